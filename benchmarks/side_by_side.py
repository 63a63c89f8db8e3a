"""
Trains an example with turnwise, with TRL alone, and with TRL on turnwise's rollouts, and compares them.

    python benchmarks/side_by_side.py --steps 16 --seeds 100 101 102 --out runs/side_by_side
    python benchmarks/side_by_side.py --steps 16 --seeds 100 101 102 --picture runs/side_by_side.svg
    python benchmarks/side_by_side.py --steps 3 --seeds 1 --ways turnwise trl --out runs/quick
    python benchmarks/side_by_side.py --config examples/train_real.yaml --lr 1e-5 --steps 20 --seeds 100 --ways trl

| way        | rollout                                             | update             |
|------------|-----------------------------------------------------|--------------------|
| `turnwise` | `turnwise train`                                    | `turnwise train`   |
| `trl`      | the loop of TRL's GRPOTrainer, on transformers      | TRL's GRPOTrainer  |
| `bridge`   | turnwise, through turnwise-trl-bridge               | TRL's GRPOTrainer  |

All settings but the learning rate come from the config, examples/train_calculator.yaml unless `--config` names another:
the model, the tasks and their order, the reward, the limits of an episode, the advantages, the clip, the mini-batches,
AdamW and the schedule of its rate. The rate is `--lr`, the same for each way, without `noise_adaptive`. TRL's own
rollout knows two pairs of agent and reward: `tool_agent` with `exact_match` and the calculator, and `single_turn` with
`reasoning_gym`. TRL's loss is `bnpo`, the mean over the tokens of a mini-batch, as in the config. Held-out rewards come
from `turnwise eval` for each way, with the same tasks and seeds, and have its 95 % interval.

TRL's tool loop parses the calls with TRL's template for Qwen3, which has the same format, and masks the tool messages.
Its `generate` samples a turn of all episodes before it runs any tool, and reads the whole conversation again for each
turn. TRL's continuous batching is not used: on a CPU it is much slower.

These differences remain:

- The samples differ: each way derives the seeds of its episodes in another way.
- TRL ends an episode at a call that is not JSON or has no end. turnwise tells the model that the call is malformed. The
  errors of a missing tool or argument have other words.
- TRL assigns episodes to mini-batches at random; turnwise keeps groups together.
- TRL adds 1e-4 to the standard deviation of a group, turnwise 1e-6.
- TRL computes the sampled log-probabilities again before the update. The bridge inherits this forward pass, but trains
  with the engine's values, as turnwise does.
- TRL runs a mini-batch in one forward pass and includes groups with equal rewards. turnwise runs passes of
  `max_tokens_per_micro_batch` tokens and leaves out such groups, because they have no gradient.
- turnwise measures the noise scale and the change of the policy, and writes a file of the episodes, in each step.

A step is one rollout with all its updates, without logging and the held-out tasks. MiB are the largest resident memory
of a training's process. Each training runs in a separate process with one thread, and one runs at a time. Each seed is
a round, and the first way of a round changes. Ctrl-C keeps the finished trainings. The picture shows the median of the
seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from measurement import describe_machine, format_spread, run_python
from side_by_side_trl import METRICS, Record, train_with_trl, write_lines

WAYS = {"turnwise": "turnwise train", "trl": "TRL alone", "bridge": "TRL on turnwise rollouts"}
COLUMNS = ("s a step", "processor s a step", "tokens/s", "tokens/processor s")
CONFIG = Path(__file__).resolve().parents[1] / "examples" / "train_calculator.yaml"
RESULTS = "results.json"
INTERRUPTED = 130


# All trainings, one process for each


def run_process(command: Sequence[str], log: Path) -> int:
    """Run a Python program quietly; return its largest resident memory in MiB, or raise `RuntimeError`."""
    return run_python(command, log, {"TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"})


def train(way: str, config: Path, overrides: Sequence[str], out: Path) -> int:
    """Train in a separate process, and return its largest resident memory in MiB."""
    out.mkdir(parents=True, exist_ok=True)
    (out / METRICS).unlink(missing_ok=True)
    command = [str(Path(__file__)), "--worker", way, "--config", str(config), "--out", str(out)]
    command += ["--overrides", *overrides]
    if way == "turnwise":
        # `turnwise eval` has the held-out tasks afterwards, as for the other ways.
        options = ["data.validation_path=null", "--out", str(out), "--overwrite"]
        command = ["-m", "turnwise.cli", "train", str(config), *overrides, *options]
    return run_process(command, out.with_suffix(".log"))


def evaluate(config: Path, overrides: Sequence[str], step: int, out: Path, model: Path | None = None) -> Record:
    """Return the held-out reward of a model, or of the config's, with its interval."""
    chosen = [] if model is None else [f"model.path={model.resolve()}"]
    options = [*overrides, *chosen, "--step", str(step), "--out", str(out), "--overwrite"]
    run_process(["-m", "turnwise.cli", "eval", str(config), *options], out.with_suffix(".log"))
    results = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))["results"]["all"]
    return next(dict(figure) for name, figure in results.items() if name.startswith("mean@"))


def read_steps(out: Path) -> list[Record]:
    """Return the figures of each step of a training."""
    lines = [json.loads(line) for line in (out / METRICS).read_text(encoding="utf-8").splitlines()]
    steps, before = [], 0.0
    for line in lines:
        if "reward/mean" not in line:
            continue
        cpu, before = line["seconds/train_cpu"] - before, line["seconds/train_cpu"]
        wall, tokens = line["seconds/step"], line["tokens/action"]
        figures = dict(zip(COLUMNS, (wall, cpu, tokens / wall, tokens / cpu), strict=True))
        kept = {"reward": line["reward/mean"], "tokens": tokens, "calls an episode": line.get("tools/per_episode")}
        steps.append({"step": line["step"], **figures, **kept})
    return steps


def run_all(arguments: argparse.Namespace, results: Record) -> None:
    """Train in each way with each seed; print a line for each training, and keep the figures in a file."""
    out, config = arguments.out, arguments.config
    for number, seed in enumerate(arguments.seeds):
        # TRL has no rate that follows the noise.
        overrides = ["train.optimizer.noise_adaptive=false", f"train.optimizer.lr={arguments.lr}"]
        overrides += [f"train.num_steps={arguments.steps}", f"rollout.seed={seed}"]
        before = evaluate(config, overrides, 0, out / f"before-{seed}")
        first = number % len(arguments.ways)
        for way in [*arguments.ways[first:], *arguments.ways[:first]]:
            folder = out / f"{way}-{seed}"
            mib = train(way, config, overrides, folder)
            after = evaluate(config, overrides, arguments.steps, out / f"after-{way}-{seed}", folder / "model")
            run = {"way": way, "seed": seed, "before": before, "after": after, "steps": read_steps(folder), "MiB": mib}
            results["runs"].append(run)
            write_whole(out / RESULTS, results)
            print(describe(str(seed), way, [run], describe_reward), flush=True)


# Tables and the picture


def describe(name: str, way: str, runs: Sequence[Record], reward: Callable[[Sequence[Record]], str]) -> str:
    """Return a line of a table: the spread over the steps of trainings, and their rewards."""
    steps = [step for run in runs for step in run["steps"]]
    figures = [format_spread([step[column] for step in steps], 0 if "tokens" in column else 2) for column in COLUMNS]
    rewards = [reward([run[name] for run in runs]) for name in ("before", "after")]
    mib = format_spread([run["MiB"] for run in runs], 0)
    return f"| {' | '.join([WAYS[way], name, *figures, mib, *rewards])} |"


def describe_reward(figures: Sequence[Record]) -> str:
    """Return the held-out reward of a training with its interval."""
    (figure,) = figures
    return f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


def describe_rewards(figures: Sequence[Record]) -> str:
    """Return the spread of the held-out rewards of several trainings."""
    return format_spread([figure["value"] for figure in figures])


def format_header(name: str) -> str:
    """Return the head of a table."""
    names = ("way", name, *COLUMNS, "MiB", "held out before", "held out after")
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def by_way(runs: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the trainings of each way, in the order of the ways."""
    found = defaultdict(list)
    for run in runs:
        found[run["way"]].append(run)
    return {way: found[way] for way in WAYS if way in found}


def draw_picture(runs: Sequence[Record], out: Path, picture: Path) -> None:
    """Draw the median reward of the seeds over the steps, one line for each way."""
    folders = {}
    for way, found in by_way(runs).items():
        seconds = statistics.median(step["s a step"] for run in found for step in run["steps"])
        folder = folders[f"{WAYS[way]}, {seconds:.1f} s a step"] = out / f"picture-{way}"
        folder.mkdir(exist_ok=True)
        (folder / METRICS).unlink(missing_ok=True)
        last = found[0]["steps"][-1]["step"]
        for step, name in ((0, "before"), (last, "after")):
            held_out = statistics.median(run[name]["value"] for run in found)
            write_lines(folder / METRICS, [{"step": step, "validation/reward/mean": held_out}])
        for steps in zip(*(run["steps"] for run in found), strict=True):
            reward = statistics.median(step["reward"] for step in steps)
            write_lines(folder / METRICS, [{"step": steps[0]["step"], "reward/mean": reward}])
    picture.parent.mkdir(parents=True, exist_ok=True)
    curves = [f"{label}={folder}" for label, folder in folders.items()]
    run_process([str(Path(__file__).with_name("learning_curves.py")), str(picture), *curves], out / "picture.log")


def write_whole(path: Path, value: Record) -> None:
    """Write JSON so that an interrupt leaves the old file or the new one."""
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", type=Path, default=CONFIG, help="run config with a section train (default: the calculator)"
    )
    parser.add_argument("--steps", type=int, default=16, help="training steps of a training (default: 16)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102], help="default: 100 101 102")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate of all ways (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/side_by_side"), help="folder of the trainings")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="draw the rewards over the steps")
    parser.add_argument("--worker", choices=("trl", "bridge"), help=argparse.SUPPRESS)
    parser.add_argument("--overrides", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Train, and print the tables."""
    arguments = build_parser().parse_args()
    if arguments.worker:
        train_with_trl(arguments.worker, arguments.config, arguments.overrides, arguments.out)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    results: Record = {"machine": machine, "steps": arguments.steps, "lr": arguments.lr, "runs": []}
    print(f"{machine}\n\n{format_header('seed')}", flush=True)
    code = 0
    try:
        run_all(arguments, results)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except RuntimeError as error:
        print(error, file=sys.stderr)
        code = 1
    runs = results["runs"]
    if runs:
        print(f"\n{format_header('seeds')}")
        for way, found in by_way(runs).items():
            print(describe(str(len(found)), way, found, describe_rewards))
        print("\nmedian (min-max): seconds and tokens over the steps of all trainings, held-out rewards over the seeds")
        print(f"all figures are in {arguments.out / RESULTS}")
        if arguments.picture:
            draw_picture(runs, arguments.out, arguments.picture)
    return code


if __name__ == "__main__":
    sys.exit(main())
