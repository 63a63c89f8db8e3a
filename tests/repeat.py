"""
Runs the quick tests many times in random orders, so that a test that fails once in a while is found.

    make repeat TIMES=12
    .venv/bin/python tests/repeat.py 12 --busy 4 --cores 1 plugins/gateway core/tests/runtime

Prints a line for each run: its seed, seconds, passed tests and failed ones. `pytest --shuffle SEED PATHS` repeats the
order of a run, in one process. The exit code is 1 if any test failed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
QUICK = "not gpu and not slow"
_SPIN = "while True: pass"


def main() -> int:
    """Run the tests as the arguments say."""
    options = make_parser().parse_intermixed_args()
    seeds = random.Random(options.seed)
    failures: Counter[str] = Counter()
    num_bad = 0
    with busy_processes(options.busy, options.cores):
        for number in range(1, options.times + 1):
            seed = seeds.randrange(10**6)
            started = time.monotonic()
            code, report = run_once(seed, options)
            failed = [name for name, outcome in report.items() if outcome == "failed"]
            failures.update(failed)
            num_bad += code != 0
            print(
                f"run {number} of {options.times}: --shuffle {seed}, {time.monotonic() - started:.0f} s, "
                f"{sum(outcome == 'passed' for outcome in report.values())} passed, {len(failed)} failed, exit {code}"
            )
            for name in failed:
                print(f"    --shuffle {seed}: {name}")
            sys.stdout.flush()
    print(f"{options.times - num_bad} of {options.times} runs are green")
    for name, count in failures.most_common():
        print(f"    failed in {count} of {options.times}: {name}")
    return 1 if num_bad else 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Run the quick tests many times in random orders.")
    parser.add_argument("times", type=int, help="number of runs")
    parser.add_argument("paths", nargs="*", help="files or folders; all tests by default")
    parser.add_argument(
        "--seed", type=int, default=None, help="chooses the seeds of the runs; by default, they differ each time"
    )
    parser.add_argument("--workers", type=int, default=3, help="processes of pytest; 0 runs the tests in one")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the tests")
    parser.add_argument(
        "--cores", type=int, default=None, help="number of cores that the tests and the busy processes share"
    )
    parser.add_argument("--marker", default=QUICK, help=f"expression that selects tests; {QUICK!r} by default")
    parser.add_argument("--logs", type=Path, default=None, help="keep the output of each run in this folder")
    return parser


@contextmanager
def busy_processes(number: int, cores: int | None) -> Iterator[None]:
    """Run processes that compute, until the end of the context."""
    busy = [subprocess.Popen([*on_cores(cores), sys.executable, "-c", _SPIN]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def on_cores(number: int | None) -> list[str]:
    """Return the start of a command that runs on the first cores of this process."""
    if number is None:
        return []
    cores = sorted(os.sched_getaffinity(0))[:number]
    return ["taskset", "--cpu-list", ",".join(map(str, cores))]


def run_once(seed: int, options: argparse.Namespace) -> tuple[int, dict[str, str]]:
    """Run the tests once; return pytest's exit code, and the outcome of each test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        workers = ["--numprocesses", str(options.workers), "--dist", "worksteal"] if options.workers else []
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", options.marker, "--shuffle", str(seed)]
        command = [*on_cores(options.cores), *pytest, *workers, f"--junit-xml={report}", *options.paths]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"shuffle-{seed}.log").write_text(done.stdout, encoding="utf-8")
        if not report.exists():
            print(done.stdout)
            return done.returncode, {}
        return done.returncode, read_outcomes(report)


def read_outcomes(report: Path) -> dict[str, str]:
    """Return `passed`, `failed` or `skipped` for each test of a report."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
    return found


if __name__ == "__main__":
    sys.exit(main())
