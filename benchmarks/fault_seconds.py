"""
Measures how much longer `turnwise rollout` on Ray takes after one fault of each kind.

    python benchmarks/fault_seconds.py [--runs 3] [--episodes 400]

The faults: a worker, a replica or a reward worker is killed once the first episodes are on disk, and a tool ends the
process that it runs in for one of the tasks. The script prints the median seconds of the runs, from the start of the
command to its end, beside those of runs without a fault. It exits with 1 if an episode is missing, or has failed other
than the one whose tool ends its process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

import yaml
from measurement import describe_machine
from random_kills import ROLES, Site, kill

from turnwise import Status
from turnwise_result_files import read_results

NOTHING: Final = "nothing"
TOOL: Final = "a tool exits"
FAULTS: Final = (NOTHING, *(role for role in ROLES if role != "gcs"), TOOL)
FINISHED: Final = (Status.COMPLETED, Status.TRUNCATED)


def main() -> int:
    """Run, print and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=400, help="episodes of a run (default: %(default)s)")
    options = parser.parse_args()
    print(describe_machine())
    seconds: dict[str, list[float]] = defaultdict(list)
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), options.episodes)
        write_config_of_exits(site)
        for number in range(options.runs):
            for fault in FAULTS:  # in turn, so that other load on the machine meets all of them
                taken, num_unfinished = run(site, fault, site.folder / f"{fault}-{number}")
                seconds[fault].append(taken)
                print(f"run {number}: {fault:14} {taken:6.1f} s, {num_unfinished} unfinished", flush=True)
                num_wrong += num_unfinished != (fault == TOOL)
    undisturbed = statistics.median(seconds[NOTHING])
    for fault in FAULTS:
        median = statistics.median(seconds[fault])
        print(f"{fault:14} {median:6.1f} s  {median - undisturbed:+6.1f} s")
    print(f"{options.runs} runs of {options.episodes} episodes for each fault; wrong runs: {num_wrong}")
    return 1 if num_wrong else 0


def write_config_of_exits(site: Site) -> None:
    """Write a config in which one task in the middle ends the process of its tool."""
    config = yaml.safe_load((site.folder / "ray.yaml").read_text())
    rows = [{"messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(site.num_episodes)]
    rows[site.num_episodes // 2]["messages"][0]["content"] = "exit"
    (site.folder / "exits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tools = {"tool_modules": ["killed_parts"], "tools": [{"function": "killed_parts:leave"}]}
    (site.folder / "exits.yaml").write_text(yaml.safe_dump(config | tools | {"data": {"path": "exits.jsonl"}}))


def run(site: Site, fault: str, out: Path) -> tuple[float, int]:
    """Return the seconds of a run with a fault, and the number of episodes that are missing or have failed."""
    started = time.monotonic()
    process = site.start("exits.yaml" if fault == TOOL else "ray.yaml", "--out", str(out))
    if fault in ROLES:
        partial = out / "trajectories.parquet.partial"
        while process.poll() is None and not (partial.exists() and partial.stat().st_size > 4):
            time.sleep(0.02)
        if not kill(process.pid, fault, random.Random(0)):
            raise SystemExit(f"there was no {fault} to kill:\n{(site.folder / 'log').read_text()[-3000:]}")
    process.wait()
    seconds = time.monotonic() - started
    finished = {result.uid for result in read_results(out) if result.status in FINISHED}
    return seconds, site.num_episodes - len(finished)


if __name__ == "__main__":
    sys.exit(main())
