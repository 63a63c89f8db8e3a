"""
Kills a training with SIGKILL in an update and in the middle of a checkpoint, resumes it, and compares the ends.

    python benchmarks/killed_training.py examples/train_real.yaml --out runs/killed
    python benchmarks/killed_training.py examples/train_calculator.yaml train.tasks_per_step=4 --shares 0.5

Each training has two steps and writes a checkpoint after each. The first one is not disturbed. The others are killed
when the checkpoint of the second step has a share of the bytes of the first one, and with `--in-update` in the update
of the second step. After the resume, rewards, losses and gradients must be those of the first training, up to rounding:
which requests share a step of the engine depends on the machine. The line also tells whether the trained weights have
the same bits. Use a number of tasks with which some group has different rewards, or nothing is learned: the script says
so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measurement import describe_machine

COMPARED = ("step", "reward/mean", "actor/pg_loss", "actor/grad_norm", "tokens/action")
STEPS = ("train.num_steps=2", "train.checkpoint.every=1", "data.validation_path=null")
FIRST, SECOND = "step-00000001", "step-00000002"


def start(arguments: argparse.Namespace, name: str) -> subprocess.Popen[bytes]:
    """Start or resume a training in a process group."""
    out = arguments.out / name
    how = "--resume" if (out / "checkpoints" / FIRST).is_dir() else "--overwrite"
    command = [sys.executable, "-m", "turnwise.cli", "train", str(arguments.config), *STEPS, *arguments.overrides]
    with open(f"{out}.log", "ab") as log:
        return subprocess.Popen(
            [*command, "--out", str(out), how],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def finish(arguments: argparse.Namespace, name: str) -> tuple[list[dict[str, Any]], str]:
    """Run or resume a training to its end; return the compared metrics of each step, and a digest of the weights."""
    if start(arguments, name).wait() != 0:
        sys.exit(f"the training failed: see {arguments.out / name}.log")
    out = arguments.out / name
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    weights = sorted((out / "model").glob("*.safetensors"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in weights)).hexdigest()
    return [{each: line.get(each) for each in COMPARED} for line in lines if "actor/grad_norm" in line], digest


def kill_when(arguments: argparse.Namespace, name: str, moment: Callable[[Path], bool]) -> int:
    """Start a training and kill its processes at a moment; return the bytes of the unfinished checkpoint."""
    out = arguments.out / name
    process = start(arguments, name)
    while not moment(out):
        if process.poll() is not None:
            sys.exit(f"the training ended before its kill: see {out}.log")
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return count_bytes(out / "checkpoints" / f"{SECOND}.partial")


def count_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder, which may be renamed meanwhile."""
    sizes = []
    for file in folder.rglob("*"):
        try:
            sizes.append(file.stat().st_size if file.is_file() else 0)
        except FileNotFoundError:
            continue
    return sum(sizes)


def updates_second_step(out: Path) -> bool:
    """Return whether the log tells that the run waits for the update of the second step."""
    log = Path(f"{out}.log").read_bytes()
    return (out / "checkpoints" / FIRST).is_dir() and b"the update" in log.rpartition(b'"event": "step"')[2]


def are_equal(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Return whether the metrics of two trainings are equal up to rounding."""
    values = [[value for line in lines for value in line.values()] for lines in (one, other)]
    return len(one) == len(other) and all(map(partial(math.isclose, rel_tol=1e-4), *values))


def has_written(least: float, out: Path) -> bool:
    """Return whether the unfinished checkpoint of the second step has more than a number of bytes."""
    return count_bytes(out / "checkpoints" / f"{SECOND}.partial") > least


def main() -> int:
    """Train, kill, resume, compare and print; 1 if an end differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="run config with a section train")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value of the config")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.2, 0.5, 0.9], help="of a checkpoint's bytes")
    parser.add_argument("--in-update", action="store_true", help="also kill in an update, which must take ten seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/killed"), help="new folder of the trainings")
    arguments = parser.parse_intermixed_args()
    arguments.out.mkdir(parents=True)
    print(describe_machine(), flush=True)
    expected = finish(arguments, "whole")
    whole = count_bytes(arguments.out / "whole" / "checkpoints" / FIRST)
    print(f"not killed: {expected}", flush=True)
    if not any(line["actor/grad_norm"] for line in expected[0]):
        sys.exit("no group has different rewards, so nothing is learned; raise train.tasks_per_step")
    failed = 0
    moments: dict[str, Callable[[Path], bool]] = {"update": updates_second_step} if arguments.in_update else {}
    for share in arguments.shares:
        moments[f"checkpoint-{share:g}"] = partial(has_written, share * whole)
    for name, moment in moments.items():
        written = kill_when(arguments, name, moment)
        steps, digest = finish(arguments, name)
        same = are_equal(steps, expected[0])
        failed += not same
        verdict = "the same steps" if same else f"OTHER STEPS {steps}"
        verdict += ", the same bits" if digest == expected[1] else ", weights that differ in some bit"
        print(f"{name}: killed with {written / 1e6:.0f} of {whole / 1e6:.0f} MB written; {verdict}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
