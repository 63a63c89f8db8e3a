"""
Writes what the documentation takes from the code: the pages of `reference/`, and the demo's output in `README.md`.

    python docs/generate.py            rewrite the reference pages
    python docs/generate.py --check    write nothing; exit with 1 and name the pages that are not up to date
    python docs/generate.py demo       run what `make demo` runs, show one episode, and put both into README.md

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

from turnwise.storage import read_results

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
    """Run the demo and put its commands and their output between the marks in `README.md`."""
    readme = ROOT / "README.md"
    before, found, rest = readme.read_text(encoding="utf-8").partition(DEMO_BEGIN)
    _, ended, after = rest.partition(DEMO_END)
    if not found or not ended:
        raise SystemExit(f"README.md has no block between {DEMO_BEGIN} and {DEMO_END}")
    block = "\n".join(fenced(demo_output(), "console"))
    readme.write_text(f"{before}{DEMO_BEGIN}\n{block}\n{DEMO_END}{after}", encoding="utf-8")


def demo_commands() -> tuple[list[str], str]:
    """Return what the target `demo` runs, as a user with an active environment types it, and where it writes."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    out = re.search(r"^DEMO_OUT \?= (\S+)", makefile, re.MULTILINE)
    if recipe is None or out is None:
        raise SystemExit("the Makefile has no target demo, or no DEMO_OUT")
    lines = [line.strip().removeprefix("@") for line in recipe[1].splitlines()]
    return [line.replace("$(BIN)/", "").replace("$(DEMO_OUT)", out[1]) for line in lines], out[1]


def demo_output() -> str:
    """Return what a terminal shows of the demo and a look at one episode: each command after a `$`, and its output."""
    commands, folder = demo_commands()
    with tempfile.TemporaryDirectory() as temporary:
        out = f"{temporary}/demo"
        shown = [typed(command, folder, out) for command in commands]
        shown.append(typed(f"turnwise show {folder} {worth_a_look(Path(out))}", folder, out))
    return "\n\n".join(shown)


def typed(command: str, folder: str, out: str) -> str:
    """Run a command with `out` for `folder`, and return it and its output as a terminal shows them."""
    environment = {**os.environ, "COLUMNS": str(DEMO_COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    program, *arguments = shlex.split(command.replace(folder, out))
    path = Path(sys.executable).with_name(program)
    done = subprocess.run([path, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.rstrip() for line in done.stdout.replace(out, folder).splitlines()]
    return "\n".join([f"$ {command}", *lines]).rstrip()


def worth_a_look(folder: Path) -> int:
    """Return the number, as `turnwise show` counts, of an episode whose several calls led to the right answer."""
    results = sorted(read_results(folder), key=lambda r: (r.task.sample_index, r.task.uid, r.rollout_n))
    good = (i for i, result in enumerate(results) if result.reward == 1 and result.metrics.num_tool_calls > 1)
    return next(good, 0)


if __name__ == "__main__":
    raise SystemExit(main())
