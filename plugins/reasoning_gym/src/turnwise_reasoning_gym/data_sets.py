"""
Data sets of reasoning-gym: their options, the rows of their tasks, and their scores.

Only `gym_process` imports this module, because it imports reasoning-gym.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Self

import numpy as np
from attrs import frozen
from reasoning_gym.dataset import ProceduralDataset  # type: ignore[import-untyped]
from reasoning_gym.factory import CURRICULA, DATASETS  # type: ignore[import-untyped]  # it has no types

from turnwise.errors import DataError, describe
from turnwise.plugin.registry import did_you_mean
from turnwise.types import JsonDict
from turnwise_reasoning_gym.answers import is_same_number
from turnwise_reasoning_gym.replaced_scores import IS_RIGHT, has_nan
from turnwise_reasoning_gym.tagged_json import from_tagged, to_tagged

_SHARED: Final = ("size", "seed", "level")
_MIXES: Final = "composite"
"""A data set that mixes others by a config that no path can hold; names joined by commas are in its place."""
_NOT_FOR_ROWS: Final = frozenset({"source_dataset", "source_index"})


@frozen
class Mixture:
    """
    Data sets in equal shares.

    Attributes:
        data_sets: by their names, which may repeat none.
        size: number of tasks.
        seed: of all data sets.
    """

    data_sets: Mapping[str, Any]
    size: int
    seed: int

    @classmethod
    def read(cls, names: Sequence[str], options: JsonDict) -> Self:
        """Return the mixture of names and options; `DataError` with what is allowed."""
        known = tuple(sorted(DATASETS.keys() - {_MIXES}))
        for name in names:
            if name not in known:
                raise DataError(f"unknown data set {name!r}{did_you_mean(name, known)}")
            if names.count(name) > 1:
                raise DataError(f"data set {name!r} is there twice; for shares that differ, use data.sources")
        size, seed = _integer(options, "size", 500, 1), _integer(options, "seed", 0, 0)
        own = {name: value for name, value in options.items() if name not in ("size", "seed")}
        each = -(-size // len(names))
        return cls({name: _data_set(name, own, each, seed) for name in names}, size, seed)

    def describe(self) -> str:
        """Return one line."""
        return f"{self.size} tasks of {', '.join(self.data_sets)} of reasoning-gym, seed {self.seed}"

    def rows(self) -> Iterator[JsonDict]:
        """Yield the rows, from the data sets in turns."""
        names = list(self.data_sets)
        configs = {name: _changed(name, data_set.config) for name, data_set in self.data_sets.items()}
        for number in range(self.size):
            name, index = names[number % len(names)], number // len(names)
            # Data sets that run code of others have random numbers besides their own generator.
            random.seed(self.seed + index)
            np.random.seed((self.seed + index) % 2**32)
            try:
                entry = self.data_sets[name][index]
                metadata = to_tagged(
                    {key: value for key, value in entry["metadata"].items() if key not in _NOT_FOR_ROWS}
                )
            except Exception as error:
                raise DataError(f"data set {name!r} cannot make task {index}: {describe(error)}") from error
            yield {
                "prompt": entry["question"],
                "ground_truth": entry["answer"],
                "data_source": name,
                "reasoning_gym": {"data_set": name, "config": configs[name], "metadata": metadata},
            }


def prepare(request: JsonDict) -> None:
    """Make the data set of a request, which `score` then finds."""
    _scorer(request["data_set"], json.dumps(request["config"], sort_keys=True))


def score(request: JsonDict) -> float:
    """Return the score of an answer; 0 for one that the data set cannot read."""
    scorer = _scorer(request["data_set"], json.dumps(request["config"], sort_keys=True))
    answer, given = str(request["answer"]), request["ground_truth"]
    truth = "" if given is None else str(given)  # some data sets have metadata alone
    if is_right := IS_RIGHT.get(str(request["data_set"])):
        return float(is_right(answer, truth))
    if has_nan(answer) and not has_nan(truth):
        return 0.0
    try:
        value = float(scorer.score_answer(answer, {"answer": given, "metadata": from_tagged(request["metadata"])}))
    except (Exception, SystemExit):  # noqa: BLE001 - parsers raise anything on a model's text
        return 0.0
    if request["extracted"] and given is not None and value < 1:
        compares_texts = type(scorer).score_answer is ProceduralDataset.score_answer
        if compares_texts or _is_share(value, answer, truth):
            return float(is_same_number(answer, truth))
    return value


def _is_share(value: float, answer: str, truth: str) -> bool:
    """
    Return whether a score is the share of the right answer in the characters of a longer one.

    Some data sets give it to a sentence around the right answer. Where only the answer is left, it would pay a wrong
    one, such as 15 or -5 in place of 5.
    """
    forms = zip(_forms(answer), _forms(truth), strict=True)
    return any(right.upper() in text.upper() and value == len(right) / len(text) for text, right in forms if text)


def _forms(text: str) -> tuple[str, ...]:
    """Return a text in the forms in which data sets compare it."""
    rows = text.strip().split("\n")
    return text, text.strip(), text.replace(",", ""), "\n".join(" ".join(row.split()) for row in rows)


@lru_cache(maxsize=256)
def _scorer(name: str, config: str) -> Any:
    data_set, config_class = DATASETS[name]
    return data_set(config=config_class(**from_tagged(json.loads(config)), seed=0, size=1))


def _data_set(name: str, options: JsonDict, size: int, seed: int) -> Any:
    data_set, config_class = DATASETS[name]
    level = options.get("level")
    given = {key: value for key, value in options.items() if key != "level"}
    types = typing.get_type_hints(config_class)
    fields = tuple(item.name for item in dataclasses.fields(config_class) if item.name not in ("size", "seed"))
    for key in given:
        if key not in fields:
            raise DataError(f"unknown option {key!r} of {name}{did_you_mean(key, (*_SHARED, *fields))}")
    values = {key: _converted(value, types[key], f"option {key!r} of {name}") for key, value in given.items()}
    try:
        config = config_class(size=size, seed=seed) if level is None else _at_level(name, options, size, seed)
        config = dataclasses.replace(config, **values)
        if hasattr(config, "validate"):
            config.validate()
        return data_set(config=config)
    except DataError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or describe(error)
        raise DataError(f"options of {name} do not fit: {text}") from error


def _at_level(name: str, options: JsonDict, size: int, seed: int) -> Any:
    """Return the config of a data set at a level of its curriculum."""
    if name not in CURRICULA:
        raise DataError(f"data set {name!r} has no levels; leave out 'level'")
    curriculum = CURRICULA[name]()
    attributes = curriculum.attributes.values()
    highest = max(len(each.levels) for each in attributes) - 1
    level = _integer(options, "level", 0, 0)
    if level > highest:
        raise DataError(f"option 'level' of {name} must be at most {highest}: {level}")
    for each in attributes:
        curriculum.set_attr_level(each.name, min(level, len(each.levels) - 1))
    return curriculum.generate_configuration({"size": size, "seed": seed})


def _changed(name: str, config: Any) -> Any:
    """Return what a config changes of the defaults, as JSON, but for the tasks that it chooses."""
    defaults = DATASETS[name][1]()
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return to_tagged(
        {
            key: value
            for key, value in values.items()
            if key not in ("size", "seed") and value != getattr(defaults, key) and _is_plain(value)
        }
    )


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str | list | tuple | None) and not isinstance(value, Enum)


def _integer(options: JsonDict, name: str, default: int, least: int) -> int:
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DataError(f"option {name!r} must be an integer from {least}: {value!r}")
    return value


def _converted(value: object, kind: object, where: str) -> object:
    """Return a value as a field of a config has it; `DataError` if it cannot."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union:
        kinds = [each for each in arguments if each is not type(None)]
        return None if value is None else _converted(value, kinds[0], where)
    if origin is typing.Literal:
        return _one_of(value, arguments, where)
    items: Iterable[object] = value if isinstance(value, list) else [value]
    if kind is tuple or origin is tuple:
        return tuple(_converted(item, arguments[0], where) if arguments else item for item in items)
    if origin is not None:
        return [_converted(item, arguments[0], where) for item in items]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(_one_of(value, [each.value for each in kind], where))
    return _scalar(value, kind, where)


def _scalar(value: object, kind: object, where: str) -> object:
    if kind in (datetime.date, datetime.time):
        try:
            return kind.fromisoformat(str(value))
        except ValueError as error:
            raise DataError(f"{where} must be a {kind.__name__}: {value!r}") from error
    if kind not in (bool, int, float, str):
        raise DataError(f"{where} cannot be set in a path")
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and not isinstance(value, list | dict | None):
        return str(value)
    raise DataError(f"{where} must be of type {kind.__name__}: {value!r}")


def _one_of(value: object, allowed: Iterable[object], where: str) -> object:
    known = list(allowed)
    if value not in known:
        raise DataError(f"{where} must be one of {', '.join(map(str, known))}: {value!r}")
    return value
