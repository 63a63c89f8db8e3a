"""
The tasks: arithmetic of one to three steps, the same for the same seed, with a held-out split.

Which split an expression belongs to is a hash of its sorted numbers and symbols. So the splits are disjoint by
construction, whatever the seeds, and no held-out expression is a training one in another order.

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
"""The agent that plays a task, the name in each row's `agent_name`."""

DATA_SOURCE: Final = "calculator"
"""Where a row comes from, the name in each row's `data_source`."""

QUESTIONS: Final = ("What is {}?", "Calculate {}.", "Work out {}.")
"""How a question is worded."""

_TEST_SHARE: Final = 8
"""One signature in eight is held out."""

STEP_WEIGHTS: Final[Mapping[int, int]] = {1: 15, 2: 65, 3: 20}
"""How often a task of one, two or three calls is drawn; more of the long ones are drawn again for their size."""

_LARGEST_VALUE: Final = 9999
"""Values between steps and answers stay within four digits, which keeps episodes short."""

_EXAMPLES: Final = """
examples:
  python -m turnwise_calculator_demo.tasks --split train --num 4096 --seed 0 --out train.jsonl
  python -m turnwise_calculator_demo.tasks --split test --num 64 --seed 0 --out test.jsonl
  python -m turnwise_calculator_demo.tasks --num 512 --step-weights 5,50,45 --out hard.jsonl
"""


@frozen
class Problem:
    """One task: the question and the calls that answer it."""

    question: str
    expression: Operation

    @property
    def steps(self) -> tuple[Step, ...]:
        """The calls, in order."""
        return solve(self.expression)

    @property
    def answer(self) -> int:
        """The value of the expression."""
        return self.steps[-1].result


def split_of(expression: Operand) -> Split:
    """The split an expression belongs to; the same for every order of its numbers and symbols."""
    digest = hashlib.sha256(signature(expression).encode()).digest()
    return "test" if digest[0] % _TEST_SHARE == 0 else "train"


def generate_problems(split: Split, seed: int, step_weights: Mapping[int, int] = STEP_WEIGHTS) -> Iterator[Problem]:
    """
    An endless stream of problems of a split, the same for the same seed.

    Args:
        split: `train` or `test`.
        seed: Any integer; streams of different seeds may share problems, streams of different splits never do.
        step_weights: How often a problem of so many steps is drawn.

    Yields:
        Problems whose values, from step to step, are all between 1 and 9999.
    """
    source = random.Random(f"{split}-{seed}")
    while True:
        num_steps = source.choices(list(step_weights), weights=list(step_weights.values()))[0]
        expression = _draw_expression(source, num_steps)
        if split_of(expression) == split and _has_small_values(expression):
            yield Problem(source.choice(QUESTIONS).format(render(expression)), expression)


def generate_rows(
    split: Split, num: int, seed: int, step_weights: Mapping[int, int] = STEP_WEIGHTS
) -> list[dict[str, Any]]:
    """
    The first `num` different problems of a stream as rows of a data file.

    Args:
        split: `train` or `test`.
        num: Rows wanted.
        seed: The stream's seed.
        step_weights: How often a problem of so many steps is drawn.

    Returns:
        Rows with the keys `prompt`, `agent_name`, `data_source`, `reward_model` and `extra_info`.
    """
    problems = islice(_different(generate_problems(split, seed, step_weights)), num)
    return [_row(problem, split, index) for index, problem in enumerate(problems)]


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes rows as JSON, one a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _draw_expression(source: random.Random, num_steps: int) -> Operation:
    """A random tree of `num_steps` operations; nothing nests deeper on the right than one pair of parentheses."""
    num_left = source.randrange(max(0, num_steps - 2), num_steps)
    left = _draw_operand(source, num_left)
    return Operation(left, source.choice("+-*"), _draw_operand(source, num_steps - 1 - num_left))


def _draw_operand(source: random.Random, num_steps: int) -> Operand:
    """A random tree, or a number of one or two digits."""
    if num_steps:
        return _draw_expression(source, num_steps)
    return source.randint(2, 9) if source.random() < 1 / 3 else source.randint(10, 99)


def _has_small_values(expression: Operation) -> bool:
    """Whether every step gives a positive number of at most four digits."""
    return all(1 <= step.result <= _LARGEST_VALUE for step in solve(expression))


def _different(problems: Iterator[Problem]) -> Iterator[Problem]:
    """Drops problems whose expression came before."""
    seen: set[Operation] = set()
    for problem in problems:
        if problem.expression not in seen:
            seen.add(problem.expression)
            yield problem


def _row(problem: Problem, split: Split, index: int) -> dict[str, Any]:
    """One line of a data file."""
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


def _step_weights(text: str) -> dict[int, int]:
    """Reads how often a task of one, two and three calls is drawn."""
    try:
        weights = [int(each) for each in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or min(weights) < 0 or not any(weights):
        raise argparse.ArgumentTypeError(f"{text!r} is not three whole numbers from 0 on, one of them above: 5,50,45")
    return dict(enumerate(weights, start=1))


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m turnwise_calculator_demo.tasks",
        description="Write calculator tasks as JSONL, one task a line.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--split", choices=get_args(Split), default="train", help="which split (default: train)")
    parser.add_argument("--num", type=int, default=64, help="tasks to write (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the stream (default: 0)")
    parser.add_argument(
        "--step-weights",
        type=_step_weights,
        default=STEP_WEIGHTS,
        metavar="A,B,C",
        help="how often a task of one, two and three calls is drawn (default: 15,65,20)",
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """
    Runs the command line.

    Args:
        arguments: The arguments; None takes those of the process.
    """
    options = _parser().parse_args(arguments)
    rows = generate_rows(options.split, options.num, options.seed, options.step_weights)
    write_rows(rows, options.out)
    print(f"wrote {len(rows)} {options.split} tasks to {options.out}")


if __name__ == "__main__":
    main()
