r"""
Generates arithmetic problems of one or two steps in words and symbols, reproducible by seed, with a held-out split.

    python -m turnwise_torl_python.demo.problems --split test --num 64 --out torl.jsonl
"""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, get_args

from attrs import frozen

Split = Literal["train", "test"]

_TEST_SHARE: Final = 8
"""One problem in eight is held out, chosen by a hash of its numbers and symbols."""

_LARGEST_VALUE: Final = 9999
_QUESTIONS: Final = ("What is {}?", "Calculate {}.", "Find the value of {}.")
_STORIES: Final[Mapping[str, str]] = {
    "+": "Tom has {} apples and buys {} more. How many has he now?",
    "-": "A bus with {} people loses {} of them. How many stay?",
    "*": "There are {} boxes with {} pens each. How many pens are there?",
}


@frozen
class Step:
    """One operation of two numbers."""

    left: int
    symbol: str
    right: int

    @property
    def text(self) -> str:
        """The operation as a Python expression."""
        return f"{self.left} {self.symbol} {self.right}"

    @property
    def result(self) -> int:
        """The value of the operation."""
        if self.symbol == "*":
            return self.left * self.right
        return self.left + self.right if self.symbol == "+" else self.left - self.right


@frozen
class Problem:
    """A question and the steps that answer it; the first result is the left number of the second step."""

    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        """The result of the last step."""
        return self.steps[-1].result

    @property
    def expression(self) -> str:
        """All steps as one Python expression."""
        first, *more = self.steps
        return "".join([f"({first.text})" if more else first.text, *(f" {step.symbol} {step.right}" for step in more)])


def generate_problems(split: Split, seed: int) -> Iterator[Problem]:
    """Yield an endless stream of problems of a split, with all values between 1 and 9999."""
    source = random.Random(f"{split}-{seed}")
    while True:
        problem = _draw(source)
        in_range = all(0 < step.result <= _LARGEST_VALUE for step in problem.steps)
        if in_range and _assign_split(problem) == split:
            yield problem


def _draw(source: random.Random) -> Problem:
    first = _step(source, source.randint(2, 99))
    if source.random() < 0.5:
        template = source.choice((*_QUESTIONS, None))
        story = _STORIES[first.symbol].format(first.left, first.right)
        return Problem(story if template is None else template.format(first.text), (first,))
    steps = (first, _step(source, first.result))
    problem = Problem("", steps)
    return Problem(source.choice(_QUESTIONS).format(problem.expression), steps)


def _step(source: random.Random, left: int) -> Step:
    return Step(left, source.choice("+-*"), source.randint(2, 99))


def _assign_split(problem: Problem) -> Split:
    digest = hashlib.sha256(problem.expression.encode()).digest()
    return "test" if digest[0] % _TEST_SHARE == 0 else "train"


def generate_rows(split: Split, num: int, seed: int) -> list[dict[str, Any]]:
    """Return the first distinct problems of a stream as rows of a data file."""
    unique = {problem.expression: problem for problem in islice(generate_problems(split, seed), 2 * num)}
    return [_row(problem, split, index) for index, problem in enumerate(list(unique.values())[:num])]


def _row(problem: Problem, split: Split, index: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "agent_name": "torl_python",
        "data_source": "torl_arithmetic",
        "reward_model": {"ground_truth": str(problem.answer)},
        "extra_info": {"index": index, "split": split, "expression": problem.expression},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None uses the arguments of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m turnwise_torl_python.demo.problems",
        description="Write arithmetic problems as JSONL, one per line.",
        epilog="example: python -m turnwise_torl_python.demo.problems --split test --num 64 --out torl.jsonl",
    )
    parser.add_argument("--split", choices=get_args(Split), default="train", help="which split (default: train)")
    parser.add_argument("--num", type=int, default=64, help="problems to write (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the stream (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    rows = generate_rows(options.split, options.num, options.seed)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"wrote {len(rows)} {options.split} problems to {options.out}")


if __name__ == "__main__":
    main()
