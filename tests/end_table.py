"""
Runs the cells of the matrix of ends, and prints what each shows as a table in Markdown.

Outcomes are kept in a file, from which a later call continues. With `--show` nothing runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from end_cells import COMMANDS, FAULTS, KNOWN, MOMENTS, RUNTIMES, Cell, all_cells  # noqa: E402 - needs the path
from end_checks import FULL_SIZE, find_problems  # noqa: E402 - the same
from end_runs import Outcome, as_record, run_cell, write_site  # noqa: E402 - the same

EXAMPLES = """\
Examples:
  python tests/end_table.py --only "rollout local"
  python tests/end_table.py --only "train ray, running" --again
  python tests/end_table.py --show --page docs/reference/ends.md

Exit codes: 0; 1 if a cell breaks a promise that is not known to break it.
"""


def main() -> int:
    """Run, print and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name has it; a name is printed first")
    parser.add_argument("--kept", type=Path, default=Path("runs/ends.jsonl"), metavar="FILE", help="(%(default)s)")
    parser.add_argument("--again", action="store_true", help="run cells that have an outcome too")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of the documentation")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="cells at a time (%(default)s)")
    options = parser.parse_args()
    known = {} if not options.kept.exists() else _read(options.kept)
    chosen = [cell for cell in all_cells() if re.search(options.only, str(cell))]
    if not options.show:
        todo = [each for each in chosen if not each.missing() and (options.again or each not in known)]
        options.kept.parent.mkdir(parents=True, exist_ok=True)
        known |= _run(todo, options.kept, options.parallel)
    wrong = {cell: find_problems(known[cell]) for cell in chosen if cell in known}
    for cell, problems in wrong.items():
        for problem in problems:
            print(f"{cell}: {problem}")
    missing = [cell for cell in chosen if not cell.missing() and cell not in known]
    known_bad = sum(bool(problems) and str(cell) in KNOWN for cell, problems in wrong.items())
    bad = sum(map(bool, wrong.values())) - known_bad
    counts = f"{bad} of them break a promise, and {known_bad} as they are known to"
    print(f"{len(wrong)} cells have run, {counts}; {len(missing)} have not run")
    if options.page is not None:
        options.page.write_text(page_of(known, _read_rows(options.page)), encoding="utf-8")
    return 1 if bad else 0


def _read(file: Path) -> dict[Cell, Outcome]:
    outcomes = [as_record(json.loads(line)) for line in file.read_text().splitlines()]
    return {each.cell: each for each in outcomes}  # the latest


def _run(cells: Sequence[Cell], kept: Path, parallel: int) -> dict[Cell, Outcome]:
    found = {}
    with tempfile.TemporaryDirectory(prefix="ends") as name, kept.open("a") as file:
        root = Path(name)
        sites = {
            (each.command, each.runtime): write_site(
                root / f"{each.command}-{each.runtime}", each.command, each.runtime
            )
            for each in cells
        }
        with ThreadPoolExecutor(parallel) as pool:
            arguments = [(each, sites[each.command, each.runtime], root / str(n)) for n, each in enumerate(cells)]
            for outcome in pool.map(lambda each: run_cell(*each), arguments):
                file.write(json.dumps(outcome.as_json()) + "\n")
                file.flush()
                found[outcome.cell] = outcome
                state = "; ".join(find_problems(outcome)) or "ok"
                print(f"{outcome.cell}: {outcome.seconds:.0f} s: {state}", flush=True)
    return found


def page_of(known: dict[Cell, Outcome], earlier: Mapping[Cell, str]) -> str:
    """Return the page of the documentation; cells without an outcome keep their row of an earlier page."""
    rows = {**earlier, **{cell: _row(cell, outcome) for cell, outcome in known.items()}}
    text = (HERE / "end_page.md").read_text(encoding="utf-8")
    if KNOWN:
        text += "\nCells that break a promise:\n\n" + "".join(f"- {name}: {why}.\n" for name, why in KNOWN.items())
    return text + "".join(_section(command, runtime, rows) for command in COMMANDS for runtime in RUNTIMES)


def _title(command: str, runtime: str) -> str:
    place = "in one process" if runtime == "local" else "on Ray"
    return f"## `{'gateway serve' if command == 'serve' else command}` {place}"


def _read_rows(page: Path) -> dict[Cell, str]:
    """Return the rows of a page."""
    sections = {_title(command, runtime): (command, runtime) for command in COMMANDS for runtime in RUNTIMES}
    found, section = {}, None
    for line in page.read_text(encoding="utf-8").splitlines() if page.exists() else []:
        section = sections.get(line, section)
        if section and line.startswith("| ") and not line.startswith(("| moment |", "| --- |")):
            moment, fault = (each.strip() for each in line.split("|")[1:3])
            found[Cell(*section, moment or "starting", fault)] = line
    return found


def _section(command: str, runtime: str, rows: Mapping[Cell, str]) -> str:
    title = f"\n{_title(command, runtime)}\n\n"
    undisturbed = Cell(command, runtime, "starting", "none")
    if reason := undisturbed.missing():
        return f"{title}There are no such cells: {reason}.\n"
    cells = [undisturbed, *(Cell(command, runtime, moment, fault) for moment in MOMENTS for fault in FAULTS[1:])]
    lines = [
        "| moment | fault | exit code | last line | kept | `--resume` | left |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(rows[cell] for cell in cells if cell in rows),
    ]
    return title + "\n".join(lines) + "\n" + _not_run(cells, rows)


def _not_run(cells: Iterable[Cell], rows: Mapping[Cell, str]) -> str:
    """Return a list of the cells without an outcome."""
    left: dict[str, list[str]] = {}
    for cell in cells:
        if not cell.missing() and cell not in rows:
            left.setdefault(cell.moment, []).append(cell.fault)
    lines = "".join(f"- {moment}: {', '.join(faults)}\n" for moment, faults in left.items())
    return f"\nNot run for this page:\n\n{lines}" if lines else ""


def _row(cell: Cell, outcome: Outcome) -> str:
    moment = "" if cell.fault == "none" else cell.moment
    first = outcome.first
    kept = f"{len(first.held.parts)} of {FULL_SIZE[cell.command]}"
    resumed = "; ".join(f"{each.code}{_quoted(each.last_line)}" for each in outcome.resumed)
    left = ", ".join(first.processes) or "nothing"
    return (
        f"| {moment} | {cell.fault} | {'hung' if first.code is None else first.code} |{_quoted(first.last_line)} |"
        f" {kept} | {resumed} | {left} |"
    )


def _quoted(line: str) -> str:
    """Return a line as code, without what differs from run to run; nothing for a line of the log."""
    if line.startswith("{") or "it/s]" in line:
        return ""
    line = re.sub(r"/\S*/ends\w+/\d+/out", "OUT", line)
    line = re.sub(r"/\S*/ends\w+/", "/", line)
    line = re.sub(r"/tmp/\S*|\[[\d-]+ [\d:]+\]", "...", line)
    line = line.replace("|", "\\|").replace("`", "'")
    return f" `{line[:160]}`" if line.strip() else ""


if __name__ == "__main__":
    sys.exit(main())
