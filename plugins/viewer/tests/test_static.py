"""The built page."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
WEB = Path(__file__).parents[1] / "web"
STATIC = Path(__file__).parents[1] / "src/turnwise_viewer/static"


def test_the_built_page_is_that_of_the_sources():
    """The digest of the sources is the one that `make viewer` wrote beside the built page."""
    digest = hashlib.sha256()
    sources = sorted(f"src/{path.name}" for path in (WEB / "src").iterdir())
    for name in ["build.mjs", "package-lock.json", "tsconfig.json", *sources]:
        digest.update(f"{name}\n".encode() + (WEB / name).read_bytes() + b"\n")

    assert (STATIC / "sources.sha256").read_text().strip() == digest.hexdigest(), "run `make viewer`"


def test_the_page_loads_nothing_from_outside():
    """The built page has no inline script or style, and names no address outside of itself."""
    page, script, style = ((STATIC / name).read_text() for name in ("index.html", "app.js", "app.css"))

    assert re.findall(r"<script(?![^>]*src=)|<style|\son\w+=|style=", page) == []
    assert re.findall(r'(?:src|href)="(?!app\.|icon\.)', page) == []
    assert set(re.findall(r"https?://[\w./]+", script)) <= {
        "http://www.w3.org/1998/Math/MathML",
        "http://www.w3.org/1999/xhtml",
        "http://www.w3.org/2000/svg",
    }
    assert "url(" not in style
    assert "@import" not in style
    assert "innerHTML" not in "".join(path.read_text() for path in (WEB / "src").glob("*.ts*"))


def test_the_readme_begins_with_a_picture_of_the_page():
    """The first thing below the title of README.md is one of the pictures that `docs/screenshots.py` takes."""
    _title, _empty, first = (ROOT / "README.md").read_text().splitlines()[:3]

    picture = re.fullmatch(r"!\[[^]]+\]\((docs/images/view-[a-z]+\.png)\)", first)
    assert picture, first
    assert (ROOT / picture[1]).exists()
