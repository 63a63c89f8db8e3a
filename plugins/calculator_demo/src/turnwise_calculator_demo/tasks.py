"""
Arithmetic tasks of one to three steps, reproducible by seed, with a held-out split.

A hash of the sorted numbers and symbols assigns an expression to a split. The splits are therefore disjoint for all
seeds, and no held-out expression is a reordered training expression.

Write a file of tasks with `python -m turnwise_calculator_demo.tasks --split test --num 64 --seed 0 --out tasks.jsonl`.
"""

# ruff: noqa: T201 - a command prints

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, get_args

from attrs import frozen

from turnwise_calculator_demo.expressions import Operand, Operation, Step, render, signature, solve

Split = Literal["train", "test"]

AGENT_NAME: Final = "tool_agent"
"""Value of `agent_name` in each row."""

DATA_SOURCE: Final = "calculator"
"""Value of `data_source` in each row."""

QUESTIONS: Final = ("What is {}?", "Calculate {}.", "Work out {}.")
"""Templates of the question."""

_TEST_SHARE: Final = 8
"""One in eight signatures is held out."""

STEP_WEIGHTS: Final[Mapping[int, int]] = {1: 15, 2: 65, 3: 20}
"""Weights of tasks with one, two or three calls; long tasks with too large values are drawn again."""

_LARGEST_VALUE: Final = 9999
"""Limit of intermediate values and answers; short numbers keep episodes short."""

_EXAMPLES: Final = """
examples:
  python -m turnwise_calculator_demo.tasks --split train --num 4096 --seed 0 --out train.jsonl
  python -m turnwise_calculator_demo.tasks --split test --num 64 --seed 0 --out test.jsonl
  python -m turnwise_calculator_demo.tasks --num 1024 --step-weights 5,50,45 --out hard.jsonl
"""


@frozen
class Problem:
    """A task: the question and its expression."""

    question: str
    expression: Operation

    @property
    def steps(self) -> tuple[Step, ...]:
        """The calls that solve the task, in order."""
        return solve(self.expression)

    @property
    def answer(self) -> int:
        """The value of the expression."""
        return self.steps[-1].result


def assign_split(expression: Operand) -> Split:
    """Return the split of an expression; it does not depend on the order of numbers and symbols."""
    digest = hashlib.sha256(signature(expression).encode()).digest()
    return "test" if digest[0] % _TEST_SHARE == 0 else "train"


def generate_problems(split: Split, seed: int, step_weights: Mapping[int, int] = STEP_WEIGHTS) -> Iterator[Problem]:
    """
    Yield an endless stream of problems, reproducible by seed.

    Every intermediate value of a problem is between 1 and 9999.

    Args:
        split: `train` or `test`.
        seed: Any integer; streams of different seeds may share problems, streams of different splits never do.
        step_weights: Weights of the numbers of steps.
    """
    source = random.Random(f"{split}-{seed}")
    while True:
        num_steps = source.choices(list(step_weights), weights=list(step_weights.values()))[0]
        expression = _draw_expression(source, num_steps)
        if assign_split(expression) == split and _has_small_values(expression):
            yield Problem(source.choice(QUESTIONS).format(render(expression)), expression)


def generate_rows(
    split: Split, num: int, seed: int, step_weights: Mapping[int, int] = STEP_WEIGHTS
) -> list[dict[str, Any]]:
    """
    Return the first `num` distinct problems of a stream as rows of a data file.

    Args:
        split: `train` or `test`.
        num: Number of rows.
        seed: The stream's seed.
        step_weights: Weights of the numbers of steps.

    Returns:
        Rows with the keys `prompt`, `agent_name`, `data_source`, `reward_model` and `extra_info`.
    """
    problems = islice(_drop_duplicates(generate_problems(split, seed, step_weights)), num)
    return [_row(problem, split, index) for index, problem in enumerate(problems)]


def write_rows(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _draw_expression(source: random.Random, num_steps: int) -> Operation:
    """Draw a random tree of `num_steps` operations; its right operands have at most one operation."""
    num_left = source.randrange(max(0, num_steps - 2), num_steps)
    left = _draw_operand(source, num_left)
    return Operation(left, source.choice("+-*"), _draw_operand(source, num_steps - 1 - num_left))


def _draw_operand(source: random.Random, num_steps: int) -> Operand:
    """Draw a random tree, or a number of one or two digits for no steps."""
    if num_steps:
        return _draw_expression(source, num_steps)
    return source.randint(2, 9) if source.random() < 1 / 3 else source.randint(10, 99)


def _has_small_values(expression: Operation) -> bool:
    """Return whether every step's result is positive and has at most four digits."""
    return all(1 <= step.result <= _LARGEST_VALUE for step in solve(expression))


def _drop_duplicates(problems: Iterator[Problem]) -> Iterator[Problem]:
    seen: set[Operation] = set()
    for problem in problems:
        if problem.expression not in seen:
            seen.add(problem.expression)
            yield problem


def _row(problem: Problem, split: Split, index: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "agent_name": AGENT_NAME,
        "data_source": DATA_SOURCE,
        "reward_model": {"ground_truth": str(problem.answer)},
        "extra_info": {
            "index": index,
            "split": split,
            "expression": render(problem.expression),
            "num_steps": len(problem.steps),
        },
    }


def _parse_step_weights(text: str) -> dict[int, int]:
    try:
        weights = [int(each) for each in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or min(weights) < 0 or not any(weights):
        raise argparse.ArgumentTypeError(f"expected three integers >= 0, not all 0, such as 5,50,45; got {text!r}")
    return dict(enumerate(weights, start=1))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m turnwise_calculator_demo.tasks",
        description="Write calculator tasks as JSONL, one task a line.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--split", choices=get_args(Split), default="train", help="split of the tasks (default: train)")
    parser.add_argument("--num", type=int, default=64, help="number of tasks (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the stream (default: 0)")
    parser.add_argument(
        "--step-weights",
        type=_parse_step_weights,
        default=STEP_WEIGHTS,
        metavar="A,B,C",
        help="weights of tasks with one, two and three calls (default: 15,65,20)",
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; None uses `sys.argv`."""
    options = _build_parser().parse_args(arguments)
    rows = generate_rows(options.split, options.num, options.seed, options.step_weights)
    write_rows(rows, options.out)
    print(f"wrote {len(rows)} {options.split} tasks to {options.out}")


if __name__ == "__main__":
    main()
