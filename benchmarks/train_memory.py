"""
Measure the memory of `turnwise train`: the most resident memory of each stage of a step, and of the whole command.

    python benchmarks/train_memory.py MODEL
    python benchmarks/train_memory.py MODEL --lora --set memory.mode=hybrid --set memory.level=2

MODEL is a folder of a causal model with a chat template. The training makes a few steps of 64 episodes: sums in one
turn, whose reward is the length of the answer, so that every group has a gradient whatever the model can do. The stages
are the metrics `memory/*` of the training; the total is the sum over the processes of the command, sampled ten times a
second. Memory hardly depends on what else the machine does; seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from measurement import describe_machine

GB = 1e9
REWARD = '''"""The reward of benchmarks/train_memory.py."""


def count(episode):
    return sum(len(message["content"]) for message in episode.messages if message["role"] == "assistant") / 1000
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a causal model")
    parser.add_argument("--lora", action="store_true", help="train adapters in place of all weights")
    parser.add_argument("--steps", type=int, default=2, help="training steps; the first has no moments of AdamW yet")
    parser.add_argument("--tasks", type=int, default=8, help="tasks of a step, with eight episodes each")
    parser.add_argument("--response", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of the run")
    parser.add_argument("--threads", default="1", help="threads of torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = write_run(Path(folder), arguments)
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "turnwise", "train", str(config), "--out", str(out), *arguments.set]
        peak, seconds = measure(command, arguments.threads)
        stages = read_stages(out / "metrics.jsonl")
    print(describe_machine())
    print(f"{'stage':20} {'peak GB':>8} {'seconds':>8} {'cpu s':>7}")
    for name, row in stages.items():
        print(f"{name:20} {row.get('memory', 0):8.2f} {row.get('seconds', 0):8.1f} {row.get('cpu', 0):7.1f}")
    print(f"{'the whole command':20} {peak / GB:8.2f} {seconds:8.1f}")
    if arguments.json:
        figures = {"stages": stages, "peak_gb": peak / GB, "seconds": seconds, "machine": describe_machine()}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def write_run(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write tasks, reward and config to a folder; return the config, which is JSON and so YAML, too."""
    draw = random.Random(0)
    for name, number in {"train": 4 * arguments.tasks, "heldout": 8}.items():
        tasks = [{"messages": [{"role": "user", "content": make_prompt(draw)}]} for _ in range(number)]
        lines = "".join(json.dumps(task) + "\n" for task in tasks)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    train: dict[str, Any] = {
        "num_steps": arguments.steps,
        "tasks_per_step": arguments.tasks,
        "optimizer": {"lr": 1e-5},
        "policy": {"device": "cpu"},
        "checkpoint": {"every": 1},
    }
    config = {
        "model": {"path": str(arguments.model.resolve())},
        "data": {"path": "train.jsonl", "validation_path": "heldout.jsonl"},
        "engine": {"name": "transformers", "max_context": 512},
        "agent": {"name": "single_turn"},
        "modules": ["./reward.py"],
        "reward": {"name": "./reward.py:count"},
        "rollout": {
            "n": 8,
            "validation_n": 1,
            "seed": 0,
            "prompt_length": 256,
            "response_length": arguments.response,
            "sampling": {"temperature": 1.0},
        },
        "train": {**train, "lora": {"rank": 16}} if arguments.lora else train,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return path


def make_prompt(draw: random.Random) -> str:
    """Return a sum of some numbers, in words that ask for some steps."""
    terms = " + ".join(str(draw.randrange(10, 1000)) for _ in range(draw.randrange(2, 24)))
    return f"What is {terms}? Add one number after the other, and end with the answer."


def measure(command: list[str], threads: str) -> tuple[float, float]:
    """Run a command; return the most resident bytes of its processes together, and its seconds."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": threads})
    tree = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            peak = max(peak, sum(each.memory_info().rss for each in (tree, *tree.children(recursive=True))))
        except psutil.NoSuchProcess:  # it ended since the list was made
            continue
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
    return peak, time.perf_counter() - started


def read_stages(metrics: Path) -> dict[str, dict[str, float]]:
    """Return the largest memory, and the mean of seconds and processor seconds, of each stage."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        for name, value in json.loads(line).items():
            kind, _, stage = name.removeprefix("validation/").partition("/")
            if kind in ("memory", "seconds", "cpu") and value is not None:
                found.setdefault(stage or "validation", {}).setdefault(kind, []).append(value)
    return {
        stage: {kind: max(each) if kind == "memory" else sum(each) / len(each) for kind, each in kinds.items()}
        for stage, kinds in found.items()
        if "memory" in kinds
    }


if __name__ == "__main__":
    main()
