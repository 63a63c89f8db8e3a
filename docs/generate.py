"""
Writes what the documentation takes from the code: the pages of `reference/`, and the demo's output in `README.md`.

    python docs/generate.py            rewrite the reference pages
    python docs/generate.py --check    write nothing; exit with 1 and name the pages that are not up to date
    python docs/generate.py demo       run what `make demo` runs and put its output into README.md

What the pages say is in `reference_pages`. They depend on this repository alone, not on what else is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from reference_pages import PAGES, fenced

ROOT: Final = Path(__file__).parents[1]
REFERENCE: Final = ROOT / "docs/reference"
DEMO_BEGIN: Final = "<!-- demo:begin -->"
DEMO_END: Final = "<!-- demo:end -->"
DEMO_COLUMNS: Final = 100

_NOTICE: Final = "<!-- Written by docs/generate.py from the code: change the code, then run `make docs`. -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the documentation.")
    parser.add_argument("what", nargs="?", choices=["reference", "demo"], default="reference", help="what to write")
    parser.add_argument("--check", action="store_true", help="compare the pages with what is there, and write nothing")
    options = parser.parse_args(arguments)
    if options.what == "demo":
        write_demo()
        return 0
    if options.check:
        stale = stale_pages()
        sys.stdout.write("".join(f"{path.relative_to(ROOT)} is not up to date: run `make docs`\n" for path in stale))
        return 1 if stale else 0
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


def stale_pages() -> list[Path]:
    """Return the reference pages that differ from what would be written."""
    return [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def pages() -> dict[Path, str]:
    """Return the text of each reference page."""
    texts = {name: "\n".join([_NOTICE, "", *lines()]).strip() for name, lines in PAGES.items()}
    return {REFERENCE / f"{name}.md": re.sub(r"\n{3,}", "\n\n", text) + "\n" for name, text in texts.items()}


# The demo


def write_demo() -> None:
    """Run the commands of `make demo` and put them and their output between the marks in `README.md`."""
    readme = ROOT / "README.md"
    before, found, rest = readme.read_text(encoding="utf-8").partition(DEMO_BEGIN)
    _, ended, after = rest.partition(DEMO_END)
    if not found or not ended:
        raise SystemExit(f"README.md has no block between {DEMO_BEGIN} and {DEMO_END}")
    block = "\n".join(fenced(demo_output(), "console"))
    readme.write_text(f"{before}{DEMO_BEGIN}\n{block}\n{DEMO_END}{after}", encoding="utf-8")


def demo_commands() -> list[str]:
    """Return the commands of the target `demo`, as a user with an active environment types them."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    out = re.search(r"^DEMO_OUT \?= (\S+)", makefile, re.MULTILINE)
    if recipe is None or out is None:
        raise SystemExit("the Makefile has no target demo, or no DEMO_OUT")
    lines = [line.strip().removeprefix("@") for line in recipe[1].splitlines()]
    return [line.replace("$(BIN)/", "").replace("$(DEMO_OUT)", out[1]) for line in lines]


def demo_output() -> str:
    """Return what a terminal shows of the demo: each command after a `$`, then what it prints."""
    out = re.search(r"--out (\S+)", demo_commands()[0])
    folder = out[1] if out else ""
    environment = {**os.environ, "COLUMNS": str(DEMO_COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    shown = []
    with tempfile.TemporaryDirectory() as temporary:
        for command in demo_commands():
            program, *arguments = shlex.split(command.replace(folder, f"{temporary}/demo"))
            path = Path(sys.executable).with_name(program)
            done = subprocess.run(
                [path, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            text = "\n".join(line.rstrip() for line in done.stdout.replace(f"{temporary}/demo", folder).splitlines())
            shown.append(f"$ {command}\n{text}".rstrip())
    return "\n\n".join(shown)


if __name__ == "__main__":
    raise SystemExit(main())
