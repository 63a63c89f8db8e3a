"""
The demo's tasks: sums of small numbers, and what a model that thinks in parallel writes about them.

Two numbers are added at once. Three take a block whose paths add them in orders of their own; five take a second block
for the rest. Paths slip now and then, and a summary takes what most of them say, so more paths are right more often.

`python -m turnwise_parallel_thinking.demo.sums` writes a file of tasks.
"""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from attrs import frozen

from turnwise_parallel_thinking.config import Tags

Split = Literal["train", "test"]

DATA_SOURCE: Final = "sums"
ANSWER: Final = "Final Answer: "
_LENGTHS: Final = (2, 3, 3, 5)
_EXAMPLES: Final = """\
examples:
  python -m turnwise_parallel_thinking.demo.sums --split test --num 64 --out sums.jsonl
  python -m turnwise_parallel_thinking.demo.sums --lengths 5 --num 256 --out long.jsonl
"""
_PATIENCE: Final = 100_000
"""Problems that are known already, one after the other, after which there are no more."""

_TAGS: Final = Tags()


@frozen
class Problem:
    """A sum of numbers from 1 to 9."""

    numbers: tuple[int, ...]

    @property
    def question(self) -> str:
        """What the user asks."""
        return f"What is {' + '.join(map(str, self.numbers))}?"

    @property
    def answer(self) -> int:
        """The sum."""
        return sum(self.numbers)

    @property
    def split(self) -> Split:
        """Which split it belongs to, whatever the order of its numbers: of longer sums one in eight is held out."""
        digest = hashlib.sha256(repr(sorted(self.numbers)).encode()).digest()
        return "test" if len(self.numbers) > 2 and digest[0] % 8 == 0 else "train"


def problems(split: Split, seed: int, lengths: Sequence[int] = _LENGTHS) -> Iterator[Problem]:
    """
    Yield an endless stream of problems, the same for the same seed; sums of two are in both splits.

    Args:
        split: which problems.
        seed: of the stream.
        lengths: how many numbers a sum has; each is as likely as it is often in here.
    """
    source = random.Random(f"{split}-{seed}")
    while True:
        problem = Problem(tuple(source.randint(1, 9) for _ in range(source.choice(lengths))))
        if problem.split == split or len(problem.numbers) == 2:
            yield problem


def demonstration(problem: Problem, source: random.Random, *, num_paths: int = 3, slips: float = 0.1) -> str:
    """
    Return what the model should write, as tagged text.

    Args:
        problem: the sum.
        source: of orders and slips.
        num_paths: paths of a block.
        slips: how often a path ends in a number that is one too large or too small.
    """
    if len(problem.numbers) == 2:
        return f"{ANSWER}{problem.answer}"
    first, text = _block(problem.numbers[:3], source, num_paths, slips)
    total, parts = first, ["Let me try several ways.", text]
    if rest := problem.numbers[3:]:
        total, text = _block((first, *rest), source, num_paths, slips, begins=True)
        parts += ["Now the rest.", text]
    return f"{''.join(parts)}\n{ANSWER}{total}"


def _block(
    numbers: Sequence[int], source: random.Random, num_paths: int, slips: float, *, begins: bool = False
) -> tuple[int, str]:
    """Return what a block comes to, and its text."""
    ways = [_way(numbers, source, slips, begins=begins) for _ in range(num_paths)]
    counts = Counter(total for total, _ in ways)
    # The paths stand at the same positions, so nothing may depend on their order: the smallest of the most frequent.
    total = min(value for value in counts if counts[value] == max(counts.values()))
    paths = "".join(f"{_TAGS.path}{text}{_TAGS.end_path}" for _, text in ways)
    closing = f"{_TAGS.end_block}{_TAGS.separator}{_TAGS.summary}{total}{_TAGS.end_summary}"
    return total, f"{_TAGS.block}{paths}{closing}"


def _way(numbers: Sequence[int], source: random.Random, slips: float, *, begins: bool) -> tuple[int, str]:
    """Return where one order of adding leads, and its text; `begins` keeps the first number first."""
    order = list(numbers[begins:])
    source.shuffle(order)
    order = [*numbers[:begins], *order]
    total, steps = order[0], []
    for index, number in enumerate(order[1:], 2):
        result = total + number
        if index == len(order) and source.random() < slips:
            result += source.choice((-1, 1))
        steps.append(f"{total}+{number}={result}")
        total = result
    return total, ",".join(steps)


def rows(split: Split, num: int, seed: int, lengths: Sequence[int] = _LENGTHS) -> list[dict[str, Any]]:
    """
    Return the first `num` different problems of a stream as rows of a data file.

    Raises:
        ValueError: when the stream brings nothing new any more.
    """
    chosen: dict[Problem, None] = {}
    num_known = 0
    for problem in problems(split, seed, lengths):
        num_known = num_known + 1 if problem in chosen else 0
        chosen[problem] = None
        if len(chosen) == num:
            break
        if num_known == _PATIENCE:
            raise ValueError(f"there are no more than {len(chosen)} such sums, {num} were asked for")
    return [
        {
            "prompt": [{"role": "user", "content": problem.question}],
            "agent_name": "parallel_thinking",
            "data_source": DATA_SOURCE,
            "reward_model": {"ground_truth": str(problem.answer)},
            "extra_info": {"index": index, "split": split, "num_numbers": len(problem.numbers)},
        }
        for index, problem in enumerate(chosen)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a file of tasks."""
    parser = argparse.ArgumentParser(
        prog="python -m turnwise_parallel_thinking.demo.sums",
        description="Write sums.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--split", choices=("train", "test"), default="train", help="which split (default: train)")
    parser.add_argument("--num", type=int, default=64, help="tasks to write (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the stream (default: 0)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        choices=(2, 3, 5),
        default=_LENGTHS,
        help="numbers of a sum, each as likely as it is often named (default: 2 3 3 5)",
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    try:
        lines = [json.dumps(row) + "\n" for row in rows(options.split, options.num, options.seed, options.lengths)]
    except ValueError as error:
        parser.error(str(error))
    options.out.write_text("".join(lines), encoding="utf-8")
    print(f"wrote {len(lines)} {options.split} tasks to {options.out}")


if __name__ == "__main__":
    main()
