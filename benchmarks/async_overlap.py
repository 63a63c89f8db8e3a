"""
Measures wall time of training mode `async` relative to `sync`, with slow tools.

Trains the tiny model on the calculator tasks of `examples/train_calculator.yaml`. Each tool call sleeps for a
log-normal time that depends only on the expression, so both modes wait equally long. The learning rate is 0: updates
run in full, but the policy and the amount of work stay the same. Runs of both modes alternate. The table also shows the
largest staleness of a trained group, in weight versions.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen
from measurement import format_spread
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from turnwise import RolloutManager, configure_logging
from turnwise_grpo_trainer.build import build_loop, build_trainer
from turnwise_grpo_trainer.report.live_view import TrainView
from turnwise_grpo_trainer.report.metric_log import MetricLog, read_metrics
from turnwise_grpo_trainer.train_setup import TrainSetup, read_setup

EXAMPLE = Path(__file__).parent.parent / "examples/train_calculator.yaml"
MODES = ("sync", "async")
TOOL = '''
import asyncio
import random

from turnwise_calculator_demo.calculator import calculator as compute


async def calculator(expression: str) -> str:
    """
    Computes one arithmetic operation, for example "23 + 48".

    Args:
        expression: Two numbers and one of + - * / // % ** between them.
    """
    await asyncio.sleep({median_s} * random.Random(expression).lognormvariate(0.0, {sigma}))
    return compute(expression)
'''
EPILOG = """\
Examples:
  python benchmarks/async_overlap.py
  python benchmarks/async_overlap.py --runs 3 --steps 4 --tool-median-s 0.5
  python benchmarks/async_overlap.py --max-staleness 2 --tool-sigma 1.5
"""


@frozen
class Measurement:
    """
    Results of one training.

    Attributes:
        wall_s: wall time of the steps.
        cpu_s: CPU time of the process in the steps.
        staleness: largest staleness of a trained group, in weight versions.
        episodes: number of trained episodes.
    """

    wall_s: float
    cpu_s: float
    staleness: int
    episodes: int


def load_setup(mode: str, options: argparse.Namespace) -> TrainSetup:
    """Load the training's setup."""
    overrides = (
        f"train.mode={mode}",
        f"train.num_steps={options.steps}",
        f"train.tasks_per_step={options.tasks}",
        f"train.buffer.max_staleness={options.max_staleness}",
        f"train.buffer.max_groups={(options.max_staleness + 1) * options.tasks}",
        "train.optimizer.lr=0",
        f"rollout.n={options.n}",
        "data.validation_path=null",
        "modules=[slow_calculator]",
        "tools=[slow_calculator:calculator]",
        "telemetry.log_level=error",
    )
    return read_setup(str(EXAMPLE), overrides)


def measure(mode: str, options: argparse.Namespace) -> Measurement:
    """Train once and return the results."""
    setup = load_setup(mode, options)
    configure_logging("error")
    with (
        tempfile.TemporaryDirectory() as folder,
        RolloutManager.from_config(setup.run, setup.host) as manager,
        open(os.devnull, "w") as nowhere,
    ):
        log = MetricLog(Path(folder))
        log.start(from_step=None)
        trainer = build_trainer(setup, manager)
        view = TrainView(options.steps, options.tasks * options.n, Console(file=nowhere))
        loop = build_loop(setup, manager, trainer, log, view)
        loop.run()
        trainer.close()
        lines = [line for line in read_metrics(Path(folder)) if "reward/mean" in line]
    assert len(lines) == options.steps
    return Measurement(
        loop.train_s,
        loop.train_cpu_s,
        int(max(line["buffer/staleness"] for line in lines)),
        options.steps * options.tasks * options.n,
    )


@contextlib.contextmanager
def slow_tool(options: argparse.Namespace) -> Iterator[None]:
    """Put a module with the slow tool on `sys.path`."""
    with tempfile.TemporaryDirectory() as folder:
        text = TOOL.replace("{median_s}", repr(options.tool_median_s)).replace("{sigma}", repr(options.tool_sigma))
        Path(folder, "slow_calculator.py").write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)


def build_table(results: dict[str, list[Measurement]], options: argparse.Namespace) -> Table:
    """Return the table of results."""
    title = (
        f"{options.steps} steps of {options.tasks} tasks x {options.n}; median tool time {options.tool_median_s} s,"
        f" sigma {options.tool_sigma}; {options.runs} runs: median (min-max)"
    )
    table = Table(title=title)
    for heading in ("mode", "wall s", "CPU s", "episodes/s", "max staleness", "bound"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode, runs in results.items():
        table.add_row(
            mode,
            format_spread([run.wall_s for run in runs], 1),
            format_spread([run.cpu_s for run in runs], 1),
            format_spread([run.episodes / run.wall_s for run in runs], 1),
            str(max(run.staleness for run in runs)),
            str(options.max_staleness if mode == "async" else 0),
        )
    pairs = zip(results["async"], results["sync"], strict=True)
    ratios = [overlapped.wall_s / sequential.wall_s for overlapped, sequential in pairs]
    table.add_row("async / sync", format_spread(ratios, 2), "", "", "", "")
    return table


def main() -> int:
    """Measure and print the table; return 1 if a group was staler than the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each mode, after a warm-up (default 5)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps per run (default 6)")
    parser.add_argument("--tasks", type=int, default=8, help="tasks per step (default 8)")
    parser.add_argument("--n", type=int, default=4, help="episodes per task (default 4)")
    parser.add_argument("--max-staleness", type=int, default=1, help="staleness bound of mode async (default 1)")
    parser.add_argument("--tool-median-s", type=float, default=0.3, help="median seconds of a tool call (default 0.3)")
    parser.add_argument("--tool-sigma", type=float, default=1.0, help="sigma of the log-normal times (default 1.0)")
    options = parser.parse_args()
    disable_progress_bar()
    results: dict[str, list[Measurement]] = {mode: [] for mode in MODES}
    with slow_tool(options):
        # A warm-up: imports and caches must not count for the first mode only.
        measure("sync", argparse.Namespace(**{**vars(options), "steps": 1}))
        for _ in range(options.runs):
            for mode in MODES:
                results[mode].append(measure(mode, options))
                print(f"{mode}: {results[mode][-1]}", file=sys.stderr)
    Console(width=120).print(build_table(results, options))
    staleness = {mode: max(run.staleness for run in runs) for mode, runs in results.items()}
    return int(staleness["async"] > options.max_staleness or staleness["sync"] > 0)


if __name__ == "__main__":
    sys.exit(main())
