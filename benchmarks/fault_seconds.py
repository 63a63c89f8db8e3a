"""
Measures how much longer the episodes of `turnwise rollout` on Ray take after one fault of each kind.

    python benchmarks/fault_seconds.py [--runs 5] [--episodes 400]

The faults: a worker, a replica or a reward worker is killed at the first score, and a tool ends the process that it
runs in for one of the tasks. The script prints the median seconds of the runs, from the first score to the file with
all episodes, beside those of runs without a fault, and the worker processes that died. The start of Ray and of the
actors, which takes longer and varies more than the repair of a fault, does not count. The script exits with 1 if an
episode is missing, or has failed other than the one whose tool ends its process.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

import yaml
from kill_moments import FINISHED, ROLES, find_processes
from measurement import describe_machine
from random_kills import Site

from turnwise_result_files import read_results

NOTHING: Final = "nothing"
TOOL: Final = "a tool exits"
FAULTS: Final = (NOTHING, *(role for role in ROLES if role != "gcs"), TOOL)


def main() -> int:
    """Run, print and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=400, help="episodes of a run (default: %(default)s)")
    options = parser.parse_args()
    print(describe_machine())
    seconds: dict[str, list[float]] = defaultdict(list)
    deaths: dict[str, list[int]] = defaultdict(list)
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), options.episodes)
        write_config_of_exits(site)
        for number in range(options.runs):
            for fault in FAULTS:  # in turn, so that other load on the machine meets all of them
                taken, num_unfinished = run(site, fault, site.folder / f"{fault}-{number}")
                seconds[fault].append(taken)
                deaths[fault].append(num_worker_deaths(site))
                print(
                    f"run {number}: {fault:14} {taken:6.1f} s, {num_unfinished} unfinished,"
                    f" {deaths[fault][-1]} worker deaths",
                    flush=True,
                )
                num_wrong += num_unfinished != (fault == TOOL)
    undisturbed = statistics.median(seconds[NOTHING])
    for fault in FAULTS:
        taken, died = seconds[fault], deaths[fault]
        median = statistics.median(taken)
        print(
            f"{fault:14} {median:6.1f} s ({min(taken):.1f} to {max(taken):.1f})  {median - undisturbed:+6.1f} s,"
            f" worker deaths {statistics.median(died):g} ({min(died)} to {max(died)})"
        )
    print(f"{options.runs} runs of {options.episodes} episodes for each fault; wrong runs: {num_wrong}")
    return 1 if num_wrong else 0


def write_config_of_exits(site: Site) -> None:
    """Write a config in which one task in the middle ends the process of its tool."""
    config = yaml.safe_load((site.folder / "ray.yaml").read_text())
    rows = [{"messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(site.num_episodes)]
    rows[site.num_episodes // 2]["messages"][0]["content"] = "exit"
    (site.folder / "exits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config |= {"modules": ["killed_parts"], "tools": ["killed_parts:leave"], "data": {"path": "exits.jsonl"}}
    config["plugins"] = [*config["plugins"], "plain_functions"]  # makes a tool of the function
    (site.folder / "exits.yaml").write_text(yaml.safe_dump(config))


def num_worker_deaths(site: Site) -> int:
    """Return the number of workers that died in the latest run, by its log."""
    return len(re.findall(r'"actor": "worker \d+".*"event": "actor lost"', site.log()))


def run(site: Site, fault: str, out: Path) -> tuple[float, int]:
    """Return the seconds of a run with a fault, and the number of episodes that are missing or have failed."""
    scored = out.with_name(f"{out.name}.scored")
    process = site.start("exits.yaml" if fault == TOOL else "ray.yaml", "--out", str(out), scored=scored)
    while process.poll() is None and not scored.exists():
        time.sleep(0.02)
    started = time.time()  # as the file system counts
    if fault in ROLES:
        if not (victims := find_processes(process.pid, fault)):
            raise SystemExit(f"there was no {fault} to kill:\n{site.log()[-3000:]}")
        victims[0].kill()
    process.wait()
    results = out / "trajectories.parquet"
    if not results.exists():
        raise SystemExit(f"the run did not end:\n{site.log()[-3000:]}")
    finished = {result.uid for result in read_results(out) if result.status in FINISHED}
    return results.stat().st_mtime - started, site.num_episodes - len(finished)


if __name__ == "__main__":
    sys.exit(main())
