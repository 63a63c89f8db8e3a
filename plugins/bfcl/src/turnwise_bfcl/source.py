"""The task source `bfcl`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import Any, Final

from attrs import field, frozen, validators

from turnwise.errors import DataError
from turnwise.plugin.registry import did_you_mean
from turnwise.types import JsonDict
from turnwise_bfcl.data_files import read_answers, read_questions
from turnwise_bfcl.multi_turn import CATEGORIES as MULTI_TURN
from turnwise_bfcl.multi_turn import make_row, read_functions
from turnwise_bfcl.schemas import parameter_types, tool_schema
from turnwise_task_files import parse_text

WITHOUT_ANSWERS: Final = ("irrelevance", "live_irrelevance", "live_relevance")
"""Categories that ask only whether the model calls a function."""
CATEGORIES: Final = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    *WITHOUT_ANSWERS,
    *MULTI_TURN,
)


@frozen(kw_only=True)
class Options:
    """
    Options of a path, such as `bfcl:simple_python?size=20&seed=1`.

    Attributes:
        size: number of tasks, drawn by the seed, from all categories in turns; null takes all in their order.
        seed: of the draw; a larger size with the same seed has the tasks of a smaller one.
        folder: a folder with the leaderboard's data files; null takes them from the package index.
    """

    size: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    seed: int = field(default=0, validator=validators.ge(0))
    folder: str | None = None


@frozen
class BfclSource:
    """
    Makes tasks from ``CATEGORY?NAME=VALUE&...``, or from several categories, joined by commas.

    Each row brings its functions in the column `tools`, and has its category as `data_source`.
    """

    def describe(self, text: str) -> str:
        """Return one line about the rows of a text; `DataError` when it names no category or wrong options."""
        categories, options = _parse(text)
        drawn = "all" if options.size is None else str(options.size)
        seed = "" if options.size is None else f", seed {options.seed}"
        return f"{drawn} tasks of {', '.join(categories)} of BFCL{seed}"

    def rows(self, text: str) -> Iterator[Mapping[str, object]]:
        """Yield the rows of a text; `DataError` as `describe`, and when the data cannot be read or have fewer rows."""
        categories, options = _parse(text)
        found = [_category_rows(category, options) for category in categories]
        if options.size is None:
            yield from chain.from_iterable(found)
            return
        count = sum(map(len, found))
        if options.size > count:
            raise DataError(
                f"option 'size' must be at most {count}, which {', '.join(categories)} have: {options.size}"
            )
        for category, rows in zip(categories, found, strict=True):
            random.Random(f"{options.seed} {category}").shuffle(rows)
        in_turns = chain.from_iterable(zip_longest(*found))
        yield from islice((row for row in in_turns if row is not None), options.size)


def _parse(text: str) -> tuple[list[str], Options]:
    names, options = parse_text(text, Options)
    categories = names.split(",")
    for name in categories:
        if name not in CATEGORIES:
            raise DataError(f"unknown category {name!r}{did_you_mean(name, CATEGORIES)}")
        if categories.count(name) > 1:
            raise DataError(f"category {name!r} is there twice")
    return categories, options


def _category_rows(category: str, options: Options) -> list[JsonDict]:
    questions = read_questions(category, options.folder)
    answers: list[JsonDict] = [] if category in WITHOUT_ANSWERS else read_answers(category, options.folder)
    by_id = {str(each["id"]): each for each in answers}
    programs = read_functions(options.folder) if category in MULTI_TURN else {}
    return [_row(category, each, by_id, programs) for each in questions]


def _row(category: str, entry: Any, answers: Mapping[str, Any], programs: Mapping[str, Sequence[JsonDict]]) -> JsonDict:
    name = str(entry["id"])
    try:
        if programs:
            return make_row(category, entry, answers[name]["ground_truth"], programs)
        (messages,) = entry["question"]
        functions = entry["function"]
        return {
            "uid": name,
            "messages": messages,
            "ground_truth": None if category in WITHOUT_ANSWERS else answers[name]["ground_truth"],
            "data_source": category,
            "tools": [tool_schema(each) for each in functions],
            "bfcl": {"category": category, "functions": {each["name"]: parameter_types(each) for each in functions}},
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"category {category}, entry {name!r} is not in the leaderboard's form: {error!r}") from error
