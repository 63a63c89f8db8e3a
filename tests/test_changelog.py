"""Changelog fragments have valid names, and their texts make a section."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TYPES = ["breaking", "feature", "fix", "doc"]
FRAGMENTS = sorted(path for path in ROOT.glob("changelog.d/*") if path.name not in ("README.md", "template.md.jinja"))


def test_types_are_those_of_towncrier() -> None:
    """The tests, towncrier and the README list the same types."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
    page = (ROOT / "changelog.d/README.md").read_text(encoding="utf-8")

    assert [each["directory"] for each in settings["type"]] == TYPES
    assert all(f"`{name}`" in page for name in TYPES)


def test_fragments_are_named_right() -> None:
    """Every fragment is named `NAME.TYPE.md`; a release would ignore any other."""
    pattern = rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(TYPES)})\.md"

    assert [path.name for path in FRAGMENTS if re.fullmatch(pattern, path.name) is None] == []


def test_fragments_are_sentences() -> None:
    """A fragment is one paragraph that starts with a capital and ends with a full stop."""
    for path in FRAGMENTS:
        text = path.read_text(encoding="utf-8").strip()
        assert re.fullmatch(r"[A-Z`][^\n]*(\n[^\n]+)*\.", text), path.name


def test_fragments_make_a_section() -> None:
    """towncrier accepts the fragments and shows each."""
    command = [Path(sys.executable).with_name("towncrier"), "build", "--draft", "--version", "9.9.9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n- ") == len(FRAGMENTS)


def test_changelog_has_room_for_the_next_release() -> None:
    """The changelog has the mark after which towncrier writes."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]

    assert settings["start_string"] in (ROOT / settings["filename"]).read_text(encoding="utf-8")
