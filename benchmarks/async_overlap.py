"""
What rolling out and training at once saves: wall time of mode `async` over `sync`, with tools that take their time.

The calculator tasks of `examples/train_calculator.yaml` with the tiny model. Each call of the tool waits for a time
drawn from a log-normal distribution, by the expression alone, so that both modes wait for the same. The learning rate
is 0: the policy, and with it the work, stays the same, while everything that an update does is done. Rounds of both
modes alternate. Also shown is the greatest number of weight versions that a group was behind when it was learnt from.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from turnwise import configure_logging
from turnwise_grpo_trainer.live_view import TrainView
from turnwise_grpo_trainer.metric_log import MetricLog, read_metrics
from turnwise_grpo_trainer.modes import loop_of
from turnwise_grpo_trainer.setup import Setup, read_setup

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
class Measured:
    """
    One training.

    Attributes:
        wall_s: of its steps.
        cpu_s: processor time of the process in them.
        staleness: weight versions that the oldest group was behind.
        episodes: that it learnt from.
    """

    wall_s: float
    cpu_s: float
    staleness: int
    episodes: int


def setup_of(mode: str, options: argparse.Namespace) -> Setup:
    """Return what is trained."""
    overrides = (
        f"train.mode={mode}",
        f"train.num_steps={options.steps}",
        f"train.tasks_per_step={options.tasks}",
        f"train.buffer.max_staleness={options.max_staleness}",
        f"train.buffer.max_groups={(options.max_staleness + 1) * options.tasks}",
        "train.optimizer.lr=0",
        f"rollout.n={options.n}",
        "data.validation_path=null",
        "tool_modules=[slow_calculator]",
        "tools=[{function: 'slow_calculator:calculator'}]",
        "telemetry.log_level=error",
    )
    return read_setup(str(EXAMPLE), overrides)


def trained(mode: str, options: argparse.Namespace) -> Measured:
    """Train once."""
    setup = setup_of(mode, options)
    configure_logging("error")
    with tempfile.TemporaryDirectory() as folder, setup.manager() as manager, open(os.devnull, "w") as nowhere:
        log = MetricLog(Path(folder))
        log.start(from_step=None)
        trainer = setup.trainer()
        view = TrainView(options.steps, options.tasks * options.n, Console(file=nowhere))
        loop = loop_of(setup, manager, trainer, log, view)
        loop.run()
        log.close()
        trainer.close()
        lines = [line for line in read_metrics(Path(folder)) if "reward/mean" in line]
    assert len(lines) == options.steps
    return Measured(
        loop.train_s,
        loop.train_cpu_s,
        int(max(line["buffer/staleness"] for line in lines)),
        options.steps * options.tasks * options.n,
    )


@contextlib.contextmanager
def slow_tool(options: argparse.Namespace) -> Iterator[None]:
    """Have the module of the slow tool on the path."""
    with tempfile.TemporaryDirectory() as folder:
        text = TOOL.replace("{median_s}", repr(options.tool_median_s)).replace("{sigma}", repr(options.tool_sigma))
        Path(folder, "slow_calculator.py").write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)


def spread(values: list[float], form: str = "{:.1f}") -> str:
    """Return the median, and the least and greatest value."""
    shown = [form.format(value) for value in (statistics.median(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def table_of(found: dict[str, list[Measured]], options: argparse.Namespace) -> Table:
    """Return the results for a terminal."""
    title = (
        f"{options.steps} steps of {options.tasks} tasks x {options.n}; tool {options.tool_median_s} s in the median,"
        f" sigma {options.tool_sigma}; {options.runs} runs: median (least to greatest)"
    )
    table = Table(title=title)
    for heading in ("mode", "wall s", "processor s", "episodes/s", "stalest group", "bound"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode, runs in found.items():
        table.add_row(
            mode,
            spread([run.wall_s for run in runs]),
            spread([run.cpu_s for run in runs]),
            spread([run.episodes / run.wall_s for run in runs]),
            str(max(run.staleness for run in runs)),
            str(options.max_staleness if mode == "async" else 0),
        )
    ratios = [one.wall_s / other.wall_s for one, other in zip(found["async"], found["sync"], strict=True)]
    table.add_row("async / sync", spread(ratios, "{:.2f}"), "", "", "", "")
    return table


def main() -> int:
    """Measure and print; 1 when a group was staler than the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="of each mode (default 5), after one that does not count")
    parser.add_argument("--steps", type=int, default=6, help="weight updates of a run (default 6)")
    parser.add_argument("--tasks", type=int, default=8, help="tasks of a step (default 8)")
    parser.add_argument("--n", type=int, default=4, help="episodes of a task (default 4)")
    parser.add_argument("--max-staleness", type=int, default=1, help="bound of mode async, in versions (default 1)")
    parser.add_argument("--tool-median-s", type=float, default=0.3, help="median seconds of a call (default 0.3)")
    parser.add_argument("--tool-sigma", type=float, default=1.0, help="of the log-normal distribution (default 1.0)")
    options = parser.parse_args()
    disable_progress_bar()
    found: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    with slow_tool(options):
        trained("sync", argparse.Namespace(**{**vars(options), "steps": 1}))  # what is loaded once does not count
        for _ in range(options.runs):
            for mode in MODES:
                found[mode].append(trained(mode, options))
                print(f"{mode}: {found[mode][-1]}", file=sys.stderr)
    Console(width=120).print(table_of(found, options))
    stalest = {mode: max(run.staleness for run in runs) for mode, runs in found.items()}
    return int(stalest["async"] > options.max_staleness or stalest["sync"] > 0)


if __name__ == "__main__":
    sys.exit(main())
