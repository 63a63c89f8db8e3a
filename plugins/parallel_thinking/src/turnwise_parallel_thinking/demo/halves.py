"""
Generates the tasks of the training example, sums of two halves, and demonstrations that solve them with parallel paths.

A path has room for one half of the sum, and the summary adds what the paths found. So one path cannot solve a task, and
several paths solve it only if they do not all take the same half. The paths of a block cannot see each other: they
share the work by chance alone. In the demonstrations nearly every path takes the left half, and the summary and the
answer have a question mark if no path took a half. Training has to teach the paths to take both halves.

`python -m turnwise_parallel_thinking.demo.halves` writes a file of tasks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from attrs import frozen

from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.demo.sums import ANSWER, Split
from turnwise_parallel_thinking.demo.task_file import build_parser, build_row, write_tasks

DATA_SOURCE: Final = "halves"
LEFT_SHARE: Final = 0.97
"""Share of the demonstrated paths that take the left half."""

UNKNOWN: Final = "?"
"""A half that no path took, and the answer without it."""

_EXAMPLES: Final = """\
examples:
  python -m turnwise_parallel_thinking.demo.halves --num 512 --out train.jsonl
  python -m turnwise_parallel_thinking.demo.halves --split test --num 64 --out heldout.jsonl
"""
_MOST: Final = {"train": 549, "test": 76}
"""Problems of each split."""

_TAGS: Final = Tags()


@frozen
class HalvedSum:
    """A sum of two sums of two numbers from 1 to 5."""

    numbers: tuple[int, int, int, int]

    @property
    def question(self) -> str:
        """The text of the user's message."""
        first, second, third, fourth = self.numbers
        return f"What is ({first} + {second}) + ({third} + {fourth})?"

    @property
    def halves(self) -> dict[str, int]:
        """The value of each half by name."""
        return {"left": sum(self.numbers[:2]), "right": sum(self.numbers[2:])}

    @property
    def split(self) -> Split:
        """The split; one in eight is held out."""
        digest = hashlib.sha256(repr(self.numbers).encode()).digest()
        return "test" if digest[0] % 8 == 0 else "train"


def generate_problems(split: Split, seed: int) -> Iterator[HalvedSum]:
    """Yield an endless stream of problems, reproducible by seed."""
    source = random.Random(f"{split}-{seed}")
    while True:
        first, second, third, fourth = (source.randint(1, 5) for _ in range(4))
        problem = HalvedSum((first, second, third, fourth))
        if problem.split == split:
            yield problem


def write_demonstration(
    problem: HalvedSum, source: random.Random, *, num_paths: int, left_share: float = LEFT_SHARE
) -> str:
    """
    Return the tagged text that the model should write.

    Args:
        problem: the sum.
        source: random numbers for choices.
        num_paths: paths of the block.
        left_share: probability that a path takes the left half.
    """
    taken = ["left" if source.random() < left_share else "right" for _ in range(num_paths)]
    found = {name: str(value) if name in taken else UNKNOWN for name, value in problem.halves.items()}
    answer = UNKNOWN if UNKNOWN in found.values() else str(sum(problem.numbers))
    paths = "".join(f"{_TAGS.path}{name}={problem.halves[name]}{_TAGS.end_path}" for name in taken)
    summary = ",".join(f"{name}={value}" for name, value in found.items())
    closing = f"{_TAGS.end_block}{_TAGS.separator}{_TAGS.summary}{summary}{_TAGS.end_summary}"
    return f"{_TAGS.block}{paths}{closing}\n{ANSWER}{answer}"


def generate_rows(split: Split, num: int, seed: int) -> list[dict[str, Any]]:
    """
    Return the first `num` distinct problems of a stream as rows of a data file.

    Raises:
        ValueError: the split has fewer problems.
    """
    if num > _MOST[split]:
        raise ValueError(f"--num is {num}, but the split {split} has only {_MOST[split]} problems: lower it")
    stream = generate_problems(split, seed)
    chosen: dict[HalvedSum, None] = {}
    while len(chosen) < num:
        chosen.update(dict.fromkeys(islice(stream, num - len(chosen))))
    return [
        build_row(problem.question, sum(problem.numbers), DATA_SOURCE, index=index, split=split)
        for index, problem in enumerate(chosen)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None uses the arguments of the process."""
    parser = build_parser("halves", "Write sums of two halves as JSONL, one per line.", _EXAMPLES)
    write_tasks(parser, arguments, lambda options: generate_rows(options.split, options.num, options.seed))


if __name__ == "__main__":
    main()
