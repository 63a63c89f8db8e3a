"""
Measure what it costs to start the command line: processor time and memory, also relative to an empty Python program.

    python benchmarks/start_cost.py
    python benchmarks/start_cost.py --repeat 9 --json runs/start_cost.json

Processor time is that of the process, so a busy machine changes it less than the time on a clock. The ratio to
`python -c pass` in the same minute changes least. The limits of `turnwise --help` with all plugins of this repository
are 0.6 s and 60 MiB; `tests/test_start_cost.py` holds the memory and the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "calculator.yaml"
PROGRAMS = {
    "python -c pass": ["-c", "pass"],
    "import numpy": ["-c", "import numpy"],
    "import turnwise": ["-c", "import turnwise"],
    "a worker's plugins": ["-c", "from turnwise import Host; from turnwise.plugin.host import load; load()"],
    "a worker's imports": ["-c", "import turnwise.runtime.worker, turnwise.runtime.build"],
    "turnwise --help": ["-m", "turnwise", "--help"],
    "turnwise plugins": ["-m", "turnwise", "plugins"],
    "turnwise plan": ["-m", "turnwise", "plan", str(EXAMPLE)],
}
MIB = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each program, whose median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    arguments = parser.parse_args()
    rows = []
    for name, program in PROGRAMS.items():
        run(program)  # writes bytecode, and brings files into memory
        runs = [run(program) for _ in range(arguments.repeat)]
        seconds, mib = (statistics.median(values) for values in zip(*runs, strict=True))
        rows.append({"program": name, "cpu_s": round(seconds, 3), "peak_mib": round(mib, 1)})
    floor = rows[0]["cpu_s"]
    print(f"{'program':20} {'cpu s':>7} {'ratio':>6} {'peak MiB':>9}")
    for row in rows:
        row["ratio"] = round(row["cpu_s"] / floor, 1)
        print(f"{row['program']:20} {row['cpu_s']:7.3f} {row['ratio']:6.1f} {row['peak_mib']:9.1f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def run(program: list[str]) -> tuple[float, float]:
    """Run Python with these arguments; return its processor seconds and its peak of resident memory in MiB."""
    actions = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]
    child = os.posix_spawn(sys.executable, [sys.executable, *program], os.environ, file_actions=actions)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{' '.join(program)} failed with status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / MIB


if __name__ == "__main__":
    main()
