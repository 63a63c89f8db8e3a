"""
Compares calls with the possible answers of the leaderboard, by its own rules.

A possible answer is `{"function": {"parameter": [accepted values]}}`, in which an empty text marks a parameter that may
be left out. The leaderboard's checker has these rules, also where one could wish for others: a parallel call is
matched with the first answer that accepts it, and an array is not compared in types where it may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

_PYTHON: Final[Mapping[str, type]] = {
    "any": str,
    "array": list,
    "boolean": bool,
    "dict": dict,
    "float": float,
    "integer": int,
    "string": str,
    "tuple": list,
}
_IGNORED: Final = re.compile(r"[ ,./\-_*^]")
_OMITTED: Final = ""
"""Among accepted values: the parameter may be left out."""


@frozen
class Call:
    """A call: the name of its function, and its arguments as JSON values."""

    name: str
    arguments: Mapping[str, Any]


def check_calls(
    functions: Mapping[str, object], calls: Sequence[Call], answers: Sequence[Mapping[str, object]]
) -> bool:
    """
    Return whether calls are right.

    Args:
        functions: by name, as `turnwise_bfcl.schemas.parameter_types` returns them.
        calls: of one turn, in any order.
        answers: possible answers, as many as calls are expected.
    """
    if len(calls) != len(answers):
        return False
    left = list(calls)
    for answer in answers:
        # By its place: a call with 1.0 equals one with 1, but has another type.
        place = next((at for at, call in enumerate(left) if _fits(functions, call, answer)), None)
        if place is None:
            return False
        del left[place]
    return True


def _fits(functions: Mapping[str, Any], call: Call, answer: Mapping[str, Any]) -> bool:
    ((name, accepted),) = answer.items()
    if call.name != name:
        return False
    function, arguments = functions[name], call.arguments
    if any(parameter not in arguments for parameter in function["required"]):
        return False
    if any(parameter not in arguments and _OMITTED not in values for parameter, values in accepted.items()):
        return False
    return all(
        parameter in function["types"]
        and parameter in accepted
        and _accepts(function["types"][parameter], value, accepted[parameter])
        for parameter, value in arguments.items()
    )


def _accepts(described: Mapping[str, Any], value: Any, accepted: Sequence[Any]) -> bool:
    """Return whether a value has the type of its parameter or of the accepted values, and is one of these."""
    kind = described["type"]
    expected = _PYTHON.get(kind, str)
    elements = _PYTHON.get(described["elements"]) if kind in ("array", "tuple") else None
    if kind == "float" and type(value) is int:
        value = _as_float(value)
    first = _type_of(accepted)
    if type(value) is not expected:
        # The accepted values have another type than the description: they decide.
        return type(value) is first and value in accepted
    if (
        elements is not None
        and isinstance(value, list)
        and not any(_elements_fit(value, each, elements) for each in accepted)
    ):
        return False
    if first not in (None, expected):
        return value in accepted
    return _is_among(value, accepted, elements)


def _is_among(value: Any, accepted: Sequence[Any], elements: type | None) -> bool:
    if isinstance(value, dict):
        return any(_objects_match(value, each) for each in accepted if each != _OMITTED)
    if isinstance(value, list) and elements is dict:
        return any(_lists_of_objects_match(value, each) for each in accepted)
    if isinstance(value, list):
        # An omission has the elements of an empty text: none.
        return _texts(value) in [_texts(each) for each in accepted if isinstance(each, list | str)]
    if isinstance(value, str):
        return _text(value) in [_text(each) for each in accepted if isinstance(each, str)]
    return value in accepted


def _type_of(accepted: Sequence[object]) -> type | None:
    return next((type(each) for each in accepted if each != _OMITTED), None)


def _elements_fit(value: Sequence[object], accepted: object, expected: type) -> bool:
    """Return whether each element has the expected type or the type in an accepted list; other answers say nothing."""
    if not isinstance(accepted, list):
        return True
    return all(type(each) is expected or type(each) is _type_of(accepted) for each in value)


def _objects_match(value: object, accepted: object) -> bool:
    if not isinstance(value, dict) or not isinstance(accepted, Mapping):
        return False
    if any(key not in value and _OMITTED not in values for key, values in accepted.items()):
        return False
    return all(key in accepted and _text(each) in map(_text, accepted[key]) for key, each in value.items())


def _lists_of_objects_match(value: Sequence[object], accepted: Sequence[object]) -> bool:
    return len(value) == len(accepted) and all(map(_objects_match, value, accepted))


def _texts(values: Sequence[object]) -> list[Any]:
    return [_text(each) for each in values]


def _text(value: object) -> Any:
    """Return a text without case, spaces and some punctuation; any other value as it is."""
    return _IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")
