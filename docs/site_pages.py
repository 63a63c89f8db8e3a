"""
Adds the Markdown files outside `docs/` to the site, and turns links and code fences of the repository into those of it.

mkdocs calls the `on_...` functions. On the hosting site of the repository the same files work as they are.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
_FENCE: Final = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)
_LINK: Final = re.compile(r"\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def outside_pages() -> dict[str, str]:
    """Return the pages outside `docs/`: path in the repository to path in the site."""
    pages = {
        "README.md": "index.md",
        "CONTRIBUTING.md": "CONTRIBUTING.md",
        "CHANGELOG.md": "CHANGELOG.md",
        "changelog.d/README.md": "changelog-fragments.md",
        "core/README.md": "packages/core.md",
    }
    for file in sorted((*ROOT.glob("plugins/*/README.md"), *ROOT.glob("libs/*/README.md"))):
        pages[file.relative_to(ROOT).as_posix()] = f"packages/{file.parent.name}.md"
    return pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside `docs/`; pages that the navigation does not name are reached by links."""
    in_navigation = ("index.md", "CONTRIBUTING.md")
    for source, target in outside_pages().items():
        inclusion = InclusionLevel.INCLUDED if target in in_navigation else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, target, abs_src_path=os.fspath(ROOT / source), inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links between files into links between pages, and the names of files into titles of code blocks."""
    pages = outside_pages()
    here = page.file.src_uri
    source = next((path for path, target in pages.items() if target == here), f"docs/{here}")

    def site_link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if not target:
            return match[1]  # a source file, which the site does not have
        return f"[{match[1]}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{match[3] or ''})"

    return _FENCE.sub(r'```\1 title="\2"', _LINK.sub(site_link, markdown))
