"""The documentation says what is so: its code runs, its links lead somewhere, its generated pages are up to date."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from attrs import fields_dict

from turnwise.cli import make_parser
from turnwise.config import RunConfig
from turnwise.config_file import load_config
from turnwise.host import load, resolve

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

from page_runner import Block, blocks, commands  # noqa: E402 - beside this file, which pytest does not put on the path

DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = [
    *DOCS,
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("core/*.md")),
    *sorted(ROOT.glob("libs/*/*.md")),
    *sorted(ROOT.glob("plugins/*/*.md")),
    *sorted(ROOT.glob("changelog.d/README.md")),
]
WRITTEN = [page for page in DOCS if page.parent.name != "reference"]
"""Pages that people write; those of the reference are made from docstrings."""


def name_of(page: Path) -> str:
    """Return a page as texts show it."""
    return page.relative_to(ROOT).as_posix()


def runnable() -> Iterator[object]:
    """Yield the pages with something to run; those that load the demo model are slow, and so is pytest in pytest."""
    # The tutorial has tests of its own, in `test_tutorial.py`.
    for page in [ROOT / "README.md", *(page for page in WRITTEN if page.parent.name != "tutorial")]:
        found = list(blocks(page))
        if any(block.language == "python" or list(commands(block)) for block in found):
            text = "".join(block.text for block in found)
            is_slow = any(mark in text for mark in ("$ turnwise", "$ pytest", "manager_of("))
            yield pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if is_slow else [])


def files() -> list[tuple[Path, Block]]:
    """Return the blocks that are files, with their pages."""
    return [(page, block) for page in WRITTEN for block in blocks(page) if block.file]


@pytest.mark.parametrize("page", list(runnable()))
def test_code_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    """A reader who does what the page says, from its top to its end, meets no error."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    runner = Path(__file__).with_name("page_runner.py")
    if name_of(page) == "README.md":
        # Its demo is run by `make demo`; what is left is Python.
        text = page.read_text(encoding="utf-8").replace("```console", "```text")
        page = tmp_path / "README.md"
        page.write_text(text, encoding="utf-8")

    done = subprocess.run(
        [sys.executable, runner, page], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_pages_are_up_to_date() -> None:
    """`docs/generate.py --check` names no page: what docstrings, options and parsers say is what the pages say."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs/generate.py", "--check"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    """Every link to another page, or to a heading of it, leads somewhere."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert not anchor or anchor in headings(target), f"{name_of(page)} links to {link}"


def test_every_page_can_be_found() -> None:
    """The README leads to every page of the documentation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", text)}

    assert [name_of(page) for page in DOCS if page not in linked] == []


def typed_commands(page: Path) -> Iterator[list[str]]:
    """Yield the commands that a page shows after a `$` or as an indented line."""
    for block in blocks(page):
        yield from commands(block)
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    for line in re.findall(r"^    ((?:\S*/)?(?:turnwise|pip|pytest|make)\b.*)$", text, re.MULTILINE):
        yield [word.strip('"') for word in re.split(r"\s+#\s", line)[0].split()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    """Every command is one that the parser takes, a target of the Makefile, or installs what is there."""
    parser = make_parser(load())
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for program, *arguments in typed_commands(page):
        match Path(program).name:
            case "turnwise":
                parser.parse_args(arguments)
            case "make":
                assert arguments[0] in targets
            case "pip":
                local = [each.partition("[")[0] for each in arguments if each.startswith("./")]
                named = [arguments[i + 1] for i, each in enumerate(arguments) if each in ("-c", "-r")]
                assert [each for each in (*local, *named) if not (ROOT / each).exists()] == []


def test_files_are_introduced() -> None:
    """A block that is a file is announced by its name, since Markdown does not show it."""
    for page, block in files():
        before = page.read_text(encoding="utf-8").splitlines()[: block.line - 2]
        assert f"`{block.file}`" in "\n".join(before), f"{name_of(page)}:{block.line} {block.file}"


def test_yaml_is_of_a_config(tmp_path: Path) -> None:
    """Sections that pages show have keys that a config has; whole files are whole configs."""
    for page in [*WRITTEN, *sorted(ROOT.glob("plugins/*/README.md"))]:
        for block in blocks(page):
            if block.language == "yaml":
                assert yaml.safe_load(block.text).keys() <= fields_dict(RunConfig).keys(), name_of(page)
    for _, block in files():
        if block.language == "yaml" and "self_check" not in block.text:
            path = tmp_path / block.file
            path.write_text(block.text, encoding="utf-8")
            config = load_config(path)
            assert resolve(config, load()).agent.name == config.agent.name


def test_layers_are_those_of_the_contract() -> None:
    """The page about layers lists what `lint-imports` checks."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    text = (ROOT / "docs/explanation/layers.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- layers:begin -->\n```text\n")[2].partition("\n```\n<!-- layers:end -->")[0]

    assert shown.splitlines() == settings["contracts"][0]["layers"]


def test_readme_lists_every_package() -> None:
    """The table of packages has a row for the core and for each plugin."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(core|plugins/\w+)` \| `([\w-]+)` \|", text, re.MULTILINE)
    folders = [ROOT / "core", *(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
    projects = {
        name_of(folder): tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        for folder in folders
    }

    assert dict(listed) == projects


def test_readme_shows_a_real_run() -> None:
    """The demo's block has the command of `make demo`, its tables, and one conversation with the origin of tokens."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.partition("<!-- demo:begin -->\n```console\n")[2].partition("```\n<!-- demo:end -->")[0]
    recipe = re.search(r"^demo:.*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    command = recipe[1].replace("$(BIN)/", "").replace("$(DEMO_OUT)", "runs/demo")

    first, second = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    assert first == command
    assert re.fullmatch(r"turnwise show runs/demo \d+", second)
    for expected in ("│ episodes", "completed", "wrote runs/demo", "⟦act⟧", "⟦obs⟧", "<tool_call>"):
        assert expected in block
    assert str(ROOT) not in block


def test_pages_name_no_machine() -> None:
    """No page holds a path of somebody's machine."""
    found = [name_of(page) for page in PAGES if re.search(r"/(home|root|work|tmp|Users)/", page.read_text("utf-8"))]

    assert found == []
