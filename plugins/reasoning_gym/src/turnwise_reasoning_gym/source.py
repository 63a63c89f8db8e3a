"""The task source `reasoning_gym`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from attrs import frozen

from turnwise.errors import DataError
from turnwise.types import JsonDict
from turnwise_reasoning_gym.processes import GymProcess
from turnwise_task_files import split_options


@frozen
class ReasoningGymSource:
    """
    Makes tasks from ``DATA_SET?NAME=VALUE&...``, or from several data sets, joined by commas, in equal shares.

    The options are `size`, `seed`, `level`, and the fields of the configs of the data sets. A process makes the rows:
    the order of sets of texts, which some data sets follow, is fixed in it, so that the same text has the same rows
    everywhere.
    """

    def describe(self, text: str) -> str:
        """Return one line about the rows of a text; `DataError` when it names no data set or wrong options."""
        with GymProcess("describe") as process:
            return str(_answer(process.ask(_request(text)))["line"])

    def rows(self, text: str) -> Iterator[Mapping[str, object]]:
        """Yield the rows of a text; `DataError` as `describe`, and when a data set cannot make a task."""
        with GymProcess("rows") as process:
            row = _answer(process.ask(_request(text)))
            while row:
                yield row
                row = _answer(process.read())


def _request(text: str) -> JsonDict:
    names, options = split_options(text)
    # Dates and times of YAML as texts, which the fields of data sets are made from again.
    found: JsonDict = json.loads(json.dumps({"names": names.split(","), "options": options}, default=str))
    return found


def _answer(found: JsonDict) -> JsonDict:
    if "error" in found:
        raise DataError(str(found["error"]))
    return found
