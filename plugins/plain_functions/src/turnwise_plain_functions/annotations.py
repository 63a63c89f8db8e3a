"""Tool schemas of typed functions: annotations become the parameters, the docstring their descriptions."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, NotRequired, Union

from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from turnwise.errors import ConfigError
from turnwise.types import JsonDict, ToolSchema
from turnwise_plain_functions.arguments import Arguments
from turnwise_plain_functions.docstrings import parse_docstring
from turnwise_plain_functions.records import Shown, readable
from turnwise_plain_functions.results import shown_default

_UNREADABLE: Final = (PydanticUserError, NameError, TypeError)


def function_schema(func: Callable[..., object], name: str = "") -> tuple[ToolSchema, Arguments]:
    """
    Describe a typed function: its annotations become the schema, its Google-style docstring the descriptions.

    Annotations may be all types whose JSON form pydantic knows, attrs classes, and ``Annotated[T, "description"]``. A
    parameter with a default is not required.

    Args:
        func: the function, which is called with keyword arguments.
        name: replaces the function's own name.

    Returns:
        schema: in OpenAI form.
        arguments: converts the arguments of a call.

    Raises:
        ConfigError: there is no name; or a parameter has no annotation, or one that JSON cannot carry.
    """
    name = name or getattr(func, "__name__", "")
    if not name:
        raise ConfigError(
            f"{type(func).__name__} {func!r} has no name that the model could call: give it one with name="
        )
    hints, parameters = _hints(func, name), inspect.signature(func).parameters.values()
    summary, docs = parse_docstring(inspect.getdoc(_described_by(func)) or "")
    for each in parameters:
        _check_parameter(each, hints, f"tool {name!r}: parameter {each.name!r}")
    try:
        arguments = Arguments(name, {p.name: _type_of(p, hints, docs.get(p.name, "")) for p in parameters})
        body = arguments.schema()
    except _UNREADABLE as error:
        raise _refusal(name, parameters, hints, error) from error
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": body}}, arguments


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


def _check_parameter(parameter: inspect.Parameter, hints: Mapping[str, object], where: str) -> None:
    if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        raise ConfigError(f"{where} must be an ordinary or keyword-only one: models call tools by keyword")
    if parameter.name not in hints:
        raise ConfigError(f"{where} has no type annotation")


def _type_of(parameter: inspect.Parameter, hints: Mapping[str, object], doc: str) -> object:
    """Return the annotation of a parameter for `Arguments`, with its default and its description."""
    annotation, default = readable(hints[parameter.name]), parameter.default
    shown: JsonDict = {"description": doc} if doc else {}
    if isinstance(default, FieldInfo):
        # pydantic fills in the default of a `Field`, so the function never gets the `Field` itself.
        annotation = Annotated[annotation, default]
    elif default is not inspect.Parameter.empty:
        annotation = _or_none(annotation) if default is None else annotation
        shown = {**shown_default(default), **shown}
    annotation = Annotated[annotation, Shown(shown)] if shown else annotation
    is_required = default is inspect.Parameter.empty or isinstance(default, FieldInfo)
    return annotation if is_required else NotRequired[annotation]


def _or_none(annotation: object) -> Any:
    """Return an annotation that accepts null, because a model may write the default that it reads."""
    if typing.get_origin(annotation) is Annotated:
        inner, *rest = typing.get_args(annotation)
        return Annotated[(_or_none(inner), *rest)]
    return annotation if annotation in (Any, object) else Union[annotation, None]  # noqa: UP007 - for texts too


def _refusal(
    name: str, parameters: Iterable[inspect.Parameter], hints: Mapping[str, object], error: Exception
) -> ConfigError:
    """Return an error that names the first parameter whose type cannot be read."""
    for each in parameters:
        hint = hints[each.name]
        try:
            Arguments(name, {each.name: _type_of(each, hints, "")}).schema()
        except _UNREADABLE as reason:
            shown = f"{inspect.formatannotation(hint)} ({_first_sentence(reason)})"
            return ConfigError(f"tool {name!r}: parameter {each.name!r} has a type that JSON cannot carry: {shown}")
    return ConfigError(f"tool {name!r}: its parameters cannot be read: {_first_sentence(error)}")


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split()).split(". ")[0]
