"""
Trains an example with several seeds, and with `--control` also with shuffled rewards, and prints a table for each.

    python benchmarks/learning_seeds.py examples/train_calculator.yaml --seeds 100 101 102 103 --control 100
    python benchmarks/learning_seeds.py examples/train_torl.yaml --seeds 100 101 --out runs/torl train.num_steps=10
    python benchmarks/learning_seeds.py examples/train_parallel.yaml --seeds 100 101 102 103 104 \
        --variant agent.num_paths=1 --variant train.algorithm.adv_estimator=grpo

A variant trains all seeds again, with other values of the config. One training runs at a time, on one thread. Held-out
rewards have the 95 % interval of `turnwise train`. A control also validates every `--every` steps: its largest movement
is the largest distance of these rewards from the first one. Seconds and processor seconds are of the steps, without the
validations before and after. MiB are the largest resident memory of the process.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measurement import describe_machine, format_spread, run_python

REWARD = "validation/reward/mean"
COLUMNS = ("seed", "training", "before", "after", "largest movement", "seconds", "processor", "MiB")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def train(config: Path, out: Path, overrides: Sequence[str], control: bool) -> int:
    """Run `turnwise train` in a separate process, and return its largest resident memory in MiB."""
    options = ["--shuffle-rewards"] if control else []
    command = ["-m", "turnwise.cli", "train", str(config), *overrides, *options, "--out", str(out), "--overwrite"]
    try:
        return run_python(command, out.with_suffix(".log"))
    except RuntimeError as error:
        sys.exit(str(error))


def read_metrics(out: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the lines of the validations of a training, and the line of its last step."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.get(REWARD) is not None], [line for line in lines if "reward/mean" in line][
        -1
    ]


def describe(name: str, kind: str, out: Path, mib: int) -> str:
    """Return a line of the table."""
    validations, last = read_metrics(out)
    before, after = (
        f"{line[REWARD]:.3f} [{line['validation/reward/low']:.3f}, {line['validation/reward/high']:.3f}]"
        for line in (validations[0], validations[-1])
    )
    moved = max(abs(line[REWARD] - validations[0][REWARD]) for line in validations)
    seconds = " | ".join(f"{last[name]:.0f}" for name in ("seconds/train", "seconds/train_cpu"))
    return f"| {name} | {kind} | {before} | {after} | {moved:.3f} | {seconds} | {mib} |"


def main() -> None:
    """Train, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="run config with a section train and held-out tasks")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value of the config")
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="seeds that train on the true rewards")
    parser.add_argument("--control", type=int, nargs="*", default=[], help="seeds that train on shuffled rewards")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="a.b=c", help="train all seeds again with this; repeatable"
    )
    parser.add_argument("--every", type=int, default=5, help="steps between the validations of a control (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"), help="folder of the trainings")
    arguments = parser.parse_intermixed_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"{describe_machine()}\n\n{HEADER}", flush=True)
    plans = [("", arguments.seeds, False)] + [(each, arguments.seeds, False) for each in arguments.variant]
    spreads = []
    for variant, seeds, control in [*plans, ("", arguments.control, True)]:
        kind = variant or ("shuffled rewards" if control else "the example")
        ends = []
        for seed in seeds:
            out = arguments.out / f"{arguments.config.stem}-{seed}{'-control' if control else ''}{_suffix(variant)}"
            every = [f"train.validation.every={arguments.every}"] if control else []
            mib = train(
                arguments.config, out, [f"rollout.seed={seed}", *every, *arguments.overrides, *variant.split()], control
            )
            print(describe(str(seed), kind, out, mib), flush=True)
            ends.append(read_metrics(out)[0][-1][REWARD])
        if ends and not control:
            spreads.append(f"after, median (min-max) of {len(ends)} seeds, {kind}: {format_spread(ends)}")
    print("", *spreads, sep="\n")


def _suffix(variant: str) -> str:
    """Return a variant as the end of a folder's name."""
    return re.sub(r"[^\w.=]+", "-", f"-{variant}") if variant else ""


if __name__ == "__main__":
    main()
