"""
Tools made from typed Python functions: annotations become the schema, the docstring its descriptions.

A sync function runs in a thread, so a blocking one delays only its own episode. In a process it can be killed as well.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Final, Literal, Union, cast, get_args

from attrs import evolve, field, frozen
from docstring_parser import ParseError
from docstring_parser.google import GoogleParser, Section, SectionType

from turnwise.errors import ConfigError
from turnwise.tools.process import check_importable, in_process
from turnwise.tools.schema import CompiledSchema, compile_schema
from turnwise.tools.thread import in_thread
from turnwise.types import JsonDict, JsonObject, Task, ToolResult, ToolSchema

Convert = Callable[[Any], object]
"""Converts a JSON value that fits the schema to the Python type of the annotation."""


RunIn = Literal["thread", "process", "loop"]
"""
The place where a function runs.

`thread`: the function may block and must be thread-safe. After the call's deadline its thread continues in the
background. `process`: the function may block and hang; at the deadline its process is killed. It must be importable,
and starts slower. `loop`: the function runs on the event loop and must not block, because that stops all other episodes
and deadlines.
"""


@frozen(kw_only=True, eq=False)
class FunctionTool:
    """
    A tool made from a Python function by `function_tool`; it has no sessions and gives no reward.

    Attributes:
        func: sync or async.
        schema: in OpenAI form.
        run_in: place where it runs, see `RunIn`.
    """

    func: Callable[..., Any]
    schema: ToolSchema
    run_in: RunIn = "thread"
    _converters: Mapping[str, Convert] = field(factory=dict, repr=False)
    _is_async: bool = False

    async def create(self, task: Task) -> None:
        """Do nothing: a function keeps no state between calls."""

    async def execute(self, session: object, arguments: JsonObject) -> ToolResult:
        if self.run_in == "process":
            return await in_process(self.func, arguments, convert=bool(self._converters))
        keywords = self.keywords(arguments)
        if self.run_in == "thread":
            func = (lambda **given: asyncio.run(self.func(**given))) if self._is_async else self.func
            return as_result(await in_thread(func, keywords))
        answer = self.func(**keywords)
        return as_result(await answer if self._is_async else answer)

    def keywords(self, arguments: JsonObject) -> JsonDict:
        """Return the arguments with the Python values that the function's annotations promise."""
        keywords = dict(arguments)
        for name in self._converters.keys() & keywords.keys():
            keywords[name] = self._converters[name](keywords[name])
        return keywords

    async def release(self, session: object) -> None: ...


def function_tool(
    func: Callable[..., object], *, name: str = "", schema: ToolSchema | None = None, run_in: RunIn | None = None
) -> FunctionTool:
    """
    Make a tool of a typed function.

    It may return a `ToolResult`, a string, None for no text, or anything else, which the model sees as JSON.

    Args:
        func: sync or async.
        name: replaces the function's own name.
        schema: replaces the schema that `function_schema` makes; arguments are then passed as JSON values.
        run_in: place of execution; by default a thread for sync functions and the loop for async ones.

    Raises:
        ConfigError: one line that names the wrong parameter, the wrong part of the schema, or the reason why the
            function cannot run there.

    Example:
        >>> def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> function_tool(add).schema["function"]["parameters"]["required"]
        ['a']
    """
    described, converters = function_schema(func, name) if schema is None else (schema, {})
    compiled = compile_schema(described, getattr(func, "__qualname__", ""))
    if schema is not None:
        _refuse_mismatch(func, compiled)
    is_async = inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004 - the method is looked at, not called
    tool = FunctionTool(func=func, schema=described, converters=converters, is_async=is_async)
    return placed(tool, run_in or ("loop" if is_async else "thread"))


def placed(tool: FunctionTool, run_in: str) -> FunctionTool:
    """Return the same tool with another place of execution; `ConfigError` when it cannot run there."""
    name = tool.schema["function"]["name"]
    if run_in not in get_args(RunIn):
        raise ConfigError(f"tool {name!r}: run_in must be one of {', '.join(get_args(RunIn))}, not {run_in!r}")
    if run_in == "process":
        check_importable(tool.func, name)
    return evolve(tool, run_in=cast("RunIn", run_in))


def _refuse_mismatch(func: Callable[..., object], compiled: CompiledSchema) -> None:
    """Refuse a schema whose arguments the function could not be called with."""
    body = compiled.schema["function"].get("parameters", {})
    signature = inspect.signature(func)
    for names in (body.get("required", ()), body.get("properties", ())):
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ConfigError(f"tool {compiled.name!r}: its schema does not fit the function: {error}") from error


def as_result(value: object) -> ToolResult:
    """Convert the return value of a function to a `ToolResult`; see `function_tool`."""
    if isinstance(value, ToolResult):
        return value
    if value is None or isinstance(value, str):
        return ToolResult(text=value or "")
    return ToolResult(text=json.dumps(value, ensure_ascii=False, default=str))


# Schemas from annotations


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
        ConfigError: a parameter has no annotation, or one that JSON cannot carry.
    """
    name = name or getattr(func, "__name__", "")
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
        return Described(_enumeration(arguments, where))
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return Described(_enumeration([member.value for member in annotation], where), annotation)
    if origin in (Union, types.UnionType):
        return _union([describe(argument, where) for argument in arguments], where)
    if origin in (list, Sequence):
        return _array(describe(arguments[0], where))
    if origin in (dict, Mapping) and arguments[0] is str:
        return _map(describe(arguments[1], where))
    raise ConfigError(f"{where} has a type that JSON cannot carry: {inspect.formatannotation(annotation)}")


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


_FREE_TEXT: Final = [
    "Returns",
    "Yields",
    "Raises",
    "Example",
    "Examples",
    "Note",
    "Notes",
    "Warning",
    "Warnings",
    "References",
    "Attributes",
]
_DOCSTRINGS: Final = GoogleParser(
    [
        *(Section(title, "param", SectionType.MULTIPLE) for title in ("Args", "Arguments", "Parameters")),
        *(Section(title, title, SectionType.SINGULAR) for title in (*_FREE_TEXT, "See Also")),
    ]
)


def parse_docstring(text: str) -> tuple[str, Mapping[str, str]]:
    """Return the summary of a Google-style docstring as one paragraph, and its parameters' descriptions by name."""
    try:
        parsed = _DOCSTRINGS.parse(text)
    except ParseError:  # a list of arguments without colons: people can read it, and so can the model
        return " ".join(text.split()), {}
    docs = {item.arg_name: " ".join((item.description or "").split()) for item in parsed.params}
    return " ".join((parsed.description or "").split()), docs
