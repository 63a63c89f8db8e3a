"""
Generates the demo's tasks, sums of small numbers, and demonstrations that solve them with parallel paths.

Two numbers are added directly. Three numbers take a block, whose paths add them in different orders, and five numbers
take a second block for the rest. A path sometimes slips, and the summary is the majority vote of the paths, so more
paths give more right answers.

`python -m turnwise_parallel_thinking.demo.sums` writes a file of tasks.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from attrs import frozen

from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.demo.task_file import build_parser, build_row, write_tasks

Split = Literal["train", "test"]

DATA_SOURCE: Final = "sums"
ANSWER: Final = "Final Answer: "
"""Text before the answer."""

_LENGTHS: Final = (2, 3, 3, 5)
_EXAMPLES: Final = """\
examples:
  python -m turnwise_parallel_thinking.demo.sums --split test --num 64 --out sums.jsonl
  python -m turnwise_parallel_thinking.demo.sums --lengths 5 --num 256 --out long.jsonl
"""
_MAX_REPEATS: Final = 100_000
"""The stream counts as exhausted after this many known problems in a row."""

_TAGS: Final = Tags()


@frozen
class Problem:
    """A sum of numbers from 1 to 9."""

    numbers: tuple[int, ...]

    @property
    def question(self) -> str:
        """The text of the user's message."""
        return f"What is {' + '.join(map(str, self.numbers))}?"

    @property
    def answer(self) -> int:
        """The sum of the numbers."""
        return sum(self.numbers)

    @property
    def split(self) -> Split:
        """The split, for any order of the numbers; one in eight of the sums of more than two is held out."""
        digest = hashlib.sha256(repr(sorted(self.numbers)).encode()).digest()
        return "test" if len(self.numbers) > 2 and digest[0] % 8 == 0 else "train"


def generate_problems(split: Split, seed: int, lengths: Sequence[int] = _LENGTHS) -> Iterator[Problem]:
    """
    Yield an endless stream of problems, reproducible by seed. Sums of two numbers are in both splits.

    Args:
        split: the split of the problems.
        seed: seed of the stream.
        lengths: counts of numbers, one of which is drawn for each problem; repeat a count to draw it more often.
    """
    source = random.Random(f"{split}-{seed}")
    while True:
        problem = Problem(tuple(source.randint(1, 9) for _ in range(source.choice(lengths))))
        if problem.split == split or len(problem.numbers) == 2:
            yield problem


def write_demonstration(problem: Problem, source: random.Random, *, num_paths: int = 3, slips: float = 0.1) -> str:
    """
    Return the tagged text that the model should write.

    Args:
        problem: the sum.
        source: random numbers for orders and slips.
        num_paths: paths of a block.
        slips: probability that the result of a path is off by one.
    """
    if len(problem.numbers) == 2:
        return f"{ANSWER}{problem.answer}"
    first, text = _write_block(problem.numbers[:3], source, num_paths, slips)
    total, parts = first, ["Let me try several ways.", text]
    if rest := problem.numbers[3:]:
        total, text = _write_block((first, *rest), source, num_paths, slips, keep_first=True)
        parts += ["Now the rest.", text]
    return f"{''.join(parts)}\n{ANSWER}{total}"


def _write_block(
    numbers: Sequence[int], source: random.Random, num_paths: int, slips: float, *, keep_first: bool = False
) -> tuple[int, str]:
    """Return the result of a block, and its text."""
    ways = [_write_path(numbers, source, slips, keep_first=keep_first) for _ in range(num_paths)]
    counts = Counter(total for total, _ in ways)
    # All paths start at the same position, so the result must not depend on their order: the smallest most frequent.
    total = min(value for value in counts if counts[value] == max(counts.values()))
    paths = "".join(f"{_TAGS.path}{text}{_TAGS.end_path}" for _, text in ways)
    closing = f"{_TAGS.end_block}{_TAGS.separator}{_TAGS.summary}{total}{_TAGS.end_summary}"
    return total, f"{_TAGS.block}{paths}{closing}"


def _write_path(numbers: Sequence[int], source: random.Random, slips: float, *, keep_first: bool) -> tuple[int, str]:
    """Return the result of adding the numbers in a random order, and its text; `keep_first` keeps the first number."""
    order = list(numbers[keep_first:])
    source.shuffle(order)
    order = [*numbers[:keep_first], *order]
    total, steps = order[0], []
    for index, number in enumerate(order[1:], 2):
        result = total + number
        if index == len(order) and source.random() < slips:
            result += source.choice((-1, 1))
        steps.append(f"{total}+{number}={result}")
        total = result
    return total, ",".join(steps)


def generate_rows(split: Split, num: int, seed: int, lengths: Sequence[int] = _LENGTHS) -> list[dict[str, Any]]:
    """
    Return the first `num` distinct problems of a stream as rows of a data file.

    Raises:
        ValueError: the stream has fewer distinct problems.
    """
    chosen: dict[Problem, None] = {}
    num_known = 0
    for problem in generate_problems(split, seed, lengths):
        num_known = num_known + 1 if problem in chosen else 0
        chosen[problem] = None
        if len(chosen) == num:
            break
        if num_known == _MAX_REPEATS:
            raise ValueError(f"--num is {num}, but there are only {len(chosen)} such sums: lower it or add --lengths")
    return [
        build_row(
            problem.question,
            problem.answer,
            DATA_SOURCE,
            index=index,
            split=split,
            num_numbers=len(problem.numbers),
        )
        for index, problem in enumerate(chosen)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None uses the arguments of the process."""
    parser = build_parser("sums", "Write sums as JSONL, one per line.", _EXAMPLES)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        choices=(2, 3, 5),
        default=_LENGTHS,
        help="counts of numbers to draw from; repeat a count to draw it more often (default: 2 3 3 5)",
    )
    write_tasks(
        parser, arguments, lambda options: generate_rows(options.split, options.num, options.seed, options.lengths)
    )


if __name__ == "__main__":
    main()
