"""Tool schemas of typed functions: annotations become the parameters, the docstring their descriptions."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Annotated, Any, Final, Literal, Union

from attrs import frozen

from turnwise.errors import ConfigError
from turnwise.types import JsonDict, JsonObject, ToolSchema

Convert = Callable[[Any], object]
"""Converts a JSON value that fits the schema to the Python type of the annotation."""


@frozen(eq=False)
class Described:
    """The schema of an annotation, and the conversion of its JSON values; None keeps them."""

    schema: JsonObject
    convert: Convert | None = None


def function_schema(func: Callable[..., object], name: str = "") -> tuple[ToolSchema, Mapping[str, Convert]]:
    """
    Describe a typed function: its annotations become the schema, its Google-style docstring the descriptions.

    Annotations may be str, int, float, bool, None, Any, list, dict, Literal, Enum, unions of these, and
    ``Annotated[T, "description"]``. A parameter with a default is not required.

    Args:
        func: the function, which is called with keyword arguments.
        name: replaces the function's own name.

    Returns:
        schema: in OpenAI form.
        converters: by parameter, for parameters whose JSON value differs from the annotated type.

    Raises:
        ConfigError: there is no name; or a parameter has no annotation, or one that JSON cannot carry.
    """
    from turnwise_plain_functions.docstrings import parse_docstring  # its parser would slow every command

    name = name or getattr(func, "__name__", "")
    if not name:
        raise ConfigError(
            f"{type(func).__name__} {func!r} has no name that the model could call: give it one with name="
        )
    hints, parameters = _hints(func, name), inspect.signature(func).parameters.values()
    described = {p.name: _described_parameter(p, hints, f"tool {name!r}: parameter {p.name!r}") for p in parameters}
    summary, docs = parse_docstring(inspect.getdoc(_described_by(func)) or "")
    properties = {key: _with_doc(value.schema, docs.get(key, "")) for key, value in described.items()}
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    body = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    schema = {"type": "function", "function": {"name": name, "description": summary, "parameters": body}}
    return schema, {key: value.convert for key, value in described.items() if value.convert is not None}


def _described_by(func: Callable[..., object]) -> Callable[..., object]:
    """Return the function that has the annotations and the docstring of a callable."""
    if isinstance(func, functools.partial):
        return _described_by(func.func)
    return func if inspect.isroutine(func) else type(func).__call__


def _hints(func: Callable[..., object], name: str) -> dict[str, object]:
    try:
        return typing.get_type_hints(_described_by(func), include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"tool {name!r}: its annotations cannot be read: {error}") from error


def _described_parameter(parameter: inspect.Parameter, hints: Mapping[str, object], where: str) -> Described:
    if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        raise ConfigError(f"{where} must be an ordinary or keyword-only one: models call tools by keyword")
    if parameter.name not in hints:
        raise ConfigError(f"{where} has no type annotation")
    described = describe(hints[parameter.name], where)
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    if default is None or isinstance(default, str | int | float | bool):
        return Described({**described.schema, "default": default}, described.convert)
    return described


def _with_doc(schema: JsonObject, text: str) -> JsonObject:
    return {**schema, "description": text} if text else schema


def describe(annotation: object, where: str) -> Described:
    """Return the JSON schema of one annotation; `ConfigError` says which annotation JSON cannot carry."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Annotated:
        texts = [text for text in arguments[1:] if isinstance(text, str)]
        inner = describe(arguments[0], where)
        return Described(_with_doc(inner.schema, " ".join(texts)), inner.convert)
    if origin is Literal:
        return Described(_enumeration(arguments, where), partial(_same, arguments))
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return Described(_enumeration([member.value for member in annotation], where), annotation)
    if origin in (Union, types.UnionType):
        return _union([describe(argument, where) for argument in arguments], where)
    if origin in (list, Sequence):
        return _array(describe(arguments[0], where))
    if origin in (dict, Mapping) and arguments[0] is str:
        return _map(describe(arguments[1], where))
    raise ConfigError(f"{where} has a type that JSON cannot carry: {inspect.formatannotation(annotation)}")


def _same(choices: Sequence[object], value: object) -> object:
    # JSON schema counts 1.0 as 1, and Python code that compares types does not; True is no 1 for either.
    same = (each for each in choices if each == value and isinstance(each, bool) == isinstance(value, bool))
    return next(same, value)


def _whole(value: object) -> object:
    # JSON schema counts 3.0 as an integer; Python code that indexes with it does not.
    return int(value) if isinstance(value, float) else value


_JSON_TYPES: Final = {str: "string", bool: "boolean", int: "integer", float: "number", types.NoneType: "null"}
_PLAIN: Final[Mapping[object, Described]] = {
    Any: Described({}),
    None: Described({"type": "null"}),
    **{kind: Described({"type": name}) for kind, name in _JSON_TYPES.items()},
    int: Described({"type": "integer"}, _whole),
    list: Described({"type": "array"}),
    dict: Described({"type": "object"}),
}


def _enumeration(values: Sequence[object], where: str) -> JsonObject:
    kinds = {_JSON_TYPES.get(type(value), "") for value in values}
    if "" in kinds:
        raise ConfigError(f"{where} may only be one of texts, numbers and booleans, got {list(values)!r}")
    schema: JsonDict = {"enum": list(values)}
    return {"type": kinds.pop(), **schema} if len(kinds) == 1 else schema


def _union(members: Sequence[Described], where: str) -> Described:
    simple = all(set(member.schema) == {"type"} and isinstance(member.schema["type"], str) for member in members)
    schemas = [member.schema for member in members]
    schema = {"type": [s["type"] for s in schemas]} if simple else {"anyOf": schemas}
    rest = [member for member in members if member.schema != {"type": "null"}]
    if len(rest) == 1 and (convert := rest[0].convert) is not None:
        return Described(schema, lambda value: None if value is None else convert(value))
    if any(member.convert not in (None, _whole) for member in members):
        raise ConfigError(f"{where} mixes types that JSON cannot tell apart: an Enum may only be joined with None")
    return Described(schema)


def _array(item: Described) -> Described:
    convert = item.convert
    schema = {"type": "array", "items": item.schema}
    return Described(schema, None if convert is None else lambda values: [convert(value) for value in values])


def _map(value: Described) -> Described:
    convert = value.convert
    schema = {"type": "object", "additionalProperties": value.schema}
    if convert is None:
        return Described(schema)
    return Described(schema, lambda pairs: {key: convert(each) for key, each in pairs.items()})
