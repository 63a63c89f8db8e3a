"""
Trains the calculator's small model by the reward alone and by a larger teacher, and prints the reward by samples.

    python examples/make_teacher.py --out runs/teacher
    python benchmarks/distillation.py --teacher runs/teacher --out runs/distillation
    python benchmarks/distillation.py --teacher runs/teacher --out runs/distillation --show

The reward alone trains as `examples/train_calculator.yaml`. With the teacher, `topk_kl` trains as
`examples/distill_calculator.yaml`, and `reverse_kl` with half its learning rate, because single samples are noisy. One
training runs at a time, on one thread. Samples are the episodes that were trained on. The held-out reward is at
temperature 1, with its 95 % interval of `turnwise train`. `--show` prints the trainings that are in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from measurement import describe_machine

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGS = {
    "reward": ("train_calculator.yaml", ()),
    "reverse_kl": (
        "distill_calculator.yaml",
        ("train.loss=reverse_kl", "train.optimizer.lr=3e-4", "train.optimizer.lr_schedule=constant"),
    ),
    "topk_kl": ("distill_calculator.yaml", ()),
}
REWARD = "validation/reward/mean"


def train(name: str, options: argparse.Namespace) -> None:
    """Run `turnwise train` in a separate process."""
    out, (config, changes) = options.out / name, CONFIGS[name]
    overrides = [*changes, f"train.validation.every={options.every}", "rollout.validation_n=2", *options.overrides]
    if name != "reward":
        teacher = f"{{name: teacher, path: {options.teacher.absolute()}, device: cpu, top_k: 8}}"
        overrides.append(f"train.scorers=[{teacher}]")
    command = [sys.executable, "-m", "turnwise.cli", "train", str(EXAMPLES / config), *overrides]
    with out.with_suffix(".log").open("w", encoding="utf-8") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--out", str(out), "--overwrite"], stdout=log, stderr=log, env=environment, check=False
        )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}: see {out.with_suffix('.log')}")


def read_curve(out: Path) -> list[tuple[int, float, float, float, float]]:
    """Return the samples, the held-out reward with its interval, and the seconds of processor of each validation."""
    config: dict[str, Any] = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
    per_step = config["train"]["tasks_per_step"] * config["rollout"]["n"]
    curve, spent = [], 0.0
    for text in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        spent = line.get("seconds/train_cpu", spent)
        if line.get(REWARD) is not None:
            bounds = [line[f"validation/reward/{name}"] for name in ("low", "high")]
            curve.append((line["step"] * per_step, line[REWARD], *bounds, spent))
    return curve


def show(options: argparse.Namespace) -> None:
    """Print the curves, and the samples to the target."""
    print(f"{describe_machine()}\n\n| training | samples | held-out reward | processor seconds |\n|---|---|---|---|")
    ends = []
    for name in options.only:
        curve = read_curve(options.out / name)
        for samples, reward, low, high, spent in curve:
            print(f"| {name} | {samples} | {reward:.3f} [{low:.3f}, {high:.3f}] | {spent:.0f} |")
        reached = [samples for samples, reward, *_others in curve if reward >= options.target]
        last = f"not within {curve[-1][0]} samples (best {max(each[1] for each in curve):.3f})"
        ends.append(f"{name}: reward {options.target}: {f'{reached[0]} samples' if reached else last}")
    print("", *ends, sep="\n")


def main() -> None:
    """Train, and print the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value of both configs")
    parser.add_argument("--teacher", type=Path, default=Path("runs/teacher"), help="folder of the teacher")
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"), help="folder of the trainings")
    parser.add_argument("--only", nargs="*", choices=CONFIGS, default=list(CONFIGS), help="some of the trainings")
    parser.add_argument("--every", type=int, default=4, help="steps between validations (default: %(default)s)")
    parser.add_argument("--target", type=float, default=0.95, help="reward to reach (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="print the trainings of the folder, and train nothing")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in [] if options.show else options.only:
        train(name, options)
    show(options)


if __name__ == "__main__":
    main()
