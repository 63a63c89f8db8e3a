"""
Trains the calculator's tiny model through a real program with instructor or DSPy, and writes the curve.

    python benchmarks/structured_training.py instructor --python ENVIRONMENT/bin/python --out runs/instructor
    python benchmarks/structured_training.py dspy --python ENVIRONMENT/bin/python --out runs/dspy

The gateway serves the program with `structured_output: wish`: the model may answer anything, and the program's library
checks the reply and asks again by itself. A right answer has the reward 1, half for each retry. The program runs in the
environment of its library (`make gateway-clients CLIENTS="instructor dspy"` makes both), and leases its tasks.

The model knows calls of a calculator, so instructor's tool is that call, and the training starts with the model as it
is. The prompt of DSPy's adapters is new to it, so it learns 192 of the tasks by `turnwise sft` before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from learning_curves import COLOURS, STYLE
from matplotlib import rc_context
from matplotlib.figure import Figure

from turnwise_calculator_demo import model_dir

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "structured_agents"
TASKS = ROOT / "examples/train_calculator.jsonl"
NUM_DEMONSTRATIONS = 192
"""Tasks at the head of the file that DSPy's demonstrations solve."""
CONFIG = """\
model: {{path: "{model}"}}
data: {{path: "{tasks}", columns: {{agent_name: null}}}}
engine: {{name: transformers, max_context: 2048, num_blocks: 4096, num_threads: 1}}
agent: {{name: task_pool, control_file: "{control}", structured_output: wish, max_calls: 20, lease_s: 120}}
parser: hermes
reward: reported
rollout:
  n: 8
  seed: 0
  prompt_length: {prompt_length}
  response_length: 640
  max_records: 16
  max_in_flight: 32
  sampling: {{temperature: 1.0, max_tokens: 96}}
  deadlines: {{episode_s: 600}}
train:
  num_steps: {steps}
  tasks_per_step: 16
  algorithm: {{adv_estimator: grpo, clip_ratio_high: 0.28, ppo_mini_batch_size: 64, old_log_probs: rollout}}
  optimizer: {{lr: {lr}, noise_adaptive: true, betas: [0.9, 0.95], grad_clip: 0.2, weight_decay: 0.0}}
  policy: {{device: cpu, max_tokens_per_micro_batch: 4096, num_threads: 1}}
"""


def run(*command: object) -> None:
    """Run a command of turnwise, or of a program."""
    subprocess.run(list(map(str, command)), check=True, cwd=PROGRAMS)


def teach(python: Path, out: Path) -> Path:
    """Let the model learn DSPy's prompts from demonstrations, and return its folder."""
    demonstrations, rows, model = out / "demonstrations.jsonl", out / "sft.parquet", out / "model"
    run(python, "dspy_program.py", "--demonstrations", TASKS, NUM_DEMONSTRATIONS, demonstrations)
    turnwise = (sys.executable, "-m", "turnwise.cli")
    run(*turnwise, "convert", demonstrations, "--to", "sft", "--model", model_dir(), "--out", rows)
    run(*turnwise, "sft", rows, "--model", model_dir(), "--learning-rate", 2e-3, "--batch-size", 4, "--out", model)
    return model


def train(name: str, python: Path, out: Path, model: Path, **values: float) -> None:
    """Train with the program at the side of the run; the values are those of the config."""
    control, log = out / "control.json", out / "program.jsonl"
    prompt_length = 1400
    places = {"model": model, "tasks": TASKS, "control": control, "prompt_length": prompt_length, **values}
    (out / "train.yaml").write_text(CONFIG.format(**places), encoding="utf-8")
    with (out / "program.txt").open("w", encoding="utf-8") as output:
        program = [str(python), f"{name}_program.py", str(control), str(log)]
        training = subprocess.Popen(
            [sys.executable, "-m", "turnwise.cli", "train", str(out / "train.yaml"), "--out", str(out / "train")]
        )
        worker = subprocess.Popen(program, cwd=PROGRAMS, stdout=output, stderr=output)
        try:
            while training.poll() is None:
                if worker.poll() and control.exists():
                    raise RuntimeError(f"the program failed: see {out / 'program.txt'}")
                time.sleep(0.5)
        finally:
            for process in (training, worker):
                process.terminate()
                process.wait()
    if training.returncode:
        raise RuntimeError(f"the training failed with code {training.returncode}")


def read_curve(log: Path) -> list[dict[str, float]]:
    """Return the mean reward, the share of valid replies and the retries of an episode, for each step."""
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in log.read_text(encoding="utf-8").splitlines():
        episode = json.loads(line)
        by_step[episode["step"]].append(episode)
    curve = []
    for step, episodes in sorted(by_step.items()):
        total = sum((Counter(each) for each in episodes), Counter[str]())
        curve.append(
            {
                "step": step,
                "episodes": len(episodes),
                "reward": sum(each["score"] for each in episodes) / len(episodes),
                "valid": total["valid"] / max(1, total["replies"]),
                "retries": total["retries"] / len(episodes),
            }
        )
    return curve


def read_rates(metrics: Path) -> dict[int, float]:
    """Return the learning rate of each step's update; 0 where the weights stayed."""
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["actor/lr"] for line in lines if "actor/lr" in line}


def draw(curve: list[dict[str, float]], title: str, out: Path) -> None:
    """Draw the curve: reward and share of valid replies from 0 to 1, and retries of an episode."""
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots()
        for colour, name in zip(COLOURS, ("reward", "valid", "retries"), strict=False):
            label = {"valid": "share of valid replies", "retries": "retries of an episode"}.get(name, name)
            axes.plot([each["step"] for each in curve], [each[name] for each in curve], color=colour, label=label)
        axes.set(xlabel="step", ylim=(0, None), title=title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Title": title})


def main() -> None:
    """Train, print the curve, and write it to `curve.json` and `curve.svg`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=["instructor", "dspy"])
    parser.add_argument("--python", type=Path, required=True, help="Python of the environment that has the library")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1.2e-3, help="0 shows what the start gets on the same tasks")
    parser.add_argument("--model", type=Path, help="folder of a model; DSPy's is taught without it")
    arguments = parser.parse_args()
    out, python = arguments.out.absolute(), arguments.python.absolute()
    out.mkdir(parents=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = arguments.model and arguments.model.absolute()
    model = model or (teach(python, out) if arguments.program == "dspy" else model_dir())
    train(arguments.program, python, out, model, steps=arguments.steps, lr=arguments.lr)
    curve = read_curve(out / "program.jsonl")
    rates = read_rates(out / "train" / "metrics.jsonl")
    curve = [{**line, "lr": rates.get(line["step"], 0.0)} for line in curve]
    (out / "curve.json").write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")
    draw(curve, f"{arguments.program}, structured_output: wish", out / "curve.svg")
    for line in curve:
        print(" ".join(f"{name}={value:.3g}" for name, value in line.items()))


if __name__ == "__main__":
    main()
