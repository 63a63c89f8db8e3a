"""
Follows a documentation page as a reader does, in the current folder.

    python tests/page_runner.py docs/how-to/write-a-tool.md

A fence whose info string has a second word, as in ```` ```yaml run.yaml ````, is a file of that name. Other `python`
fences are run in order, as one module. In `console` fences the lines that start with ``$ turnwise`` or ``$ pytest`` are
run, and ``$ pip install -e FOLDER`` installs its entry points.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from attrs import frozen

_FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@frozen
class Block:
    """A fenced block: its language, the name of its file (or empty), its text, and the first line of the text."""

    language: str
    file: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        yield Block(match[1], match[2] or "", match[3], text.count("\n", 0, match.start(3)) + 1)


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the commands of a `console` block as arguments; a backslash continues a command on the next line."""
    if block.language == "console":
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
            if line.startswith("$ "):
                yield shlex.split(line.removeprefix("$ "), comments=True)


def write(block: Block) -> None:
    """Write the file of a block."""
    path = Path(block.file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")


def install(folder: Path) -> None:
    """Put `src` on the path and write the entry points of the distribution, as an editable install does."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = folder / "src"
    info = source / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in entry(project)]
    (info / "entry_points.txt").write_text("".join(points))
    sys.path.insert(0, str(source.absolute()))
    importlib.invalidate_caches()


def entry(project: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Return the entry points of a distribution by group."""
    return list(project.get("entry-points", {}).items())


def run_command(arguments: list[str]) -> None:
    """Run a command of the page; raise when it fails."""
    program, *rest = arguments
    code = 0
    if program == "turnwise":
        from turnwise.cli import main

        code = main(rest)
    elif program == "pytest":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *rest]
        code = subprocess.run(call, check=False, env=environment).returncode
    elif rest[:2] == ["install", "-e"]:
        install(Path(rest[2]))
    if code != 0:
        raise SystemExit(f"{shlex.join(arguments)} ended with {code}")


def run(page: Path) -> None:
    """Follow a page from top to bottom."""
    sys.path.insert(0, str(Path.cwd()))
    module = sys.modules["page"] = ModuleType("page")  # a dataclass looks for the module of its class
    for block in blocks(page):
        if block.file:
            write(block)
        elif block.language == "python":
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(page), "exec", dont_inherit=True), module.__dict__)
        for arguments in commands(block):
            run_command(arguments)


if __name__ == "__main__":
    run(Path(sys.argv[1]).absolute())
