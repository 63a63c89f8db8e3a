"""
Classes that pydantic does not read: attrs classes, and `typing.TypedDict` before Python 3.12.

A TypedDict of the fields takes their place. The values become an object of the class when all of them fit.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Final, Literal, NotRequired, Required, Union, cast

import attrs
from pydantic import BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema
from typing_extensions import ReadOnly, TypedDict

from turnwise.types import JsonDict, JsonObject
from turnwise_plain_functions.results import NO_DEFAULT, shown_default

STRICT = ConfigDict(extra="forbid")
"""A name that the type does not have is an error; pydantic models decide themselves."""
_FACTORY: Final[type] = attrs.Factory  # type: ignore[assignment]  # a class, which its stub calls a function


@attrs.frozen(eq=False)  # a union compares its members by their hashes, and dicts have none
class Shown:
    """Annotation: parts of the schema that the model reads, such as `description` and `default`."""

    parts: JsonObject

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonDict:
        return {**handler(schema), **self.parts}


class _ByFields:
    """Annotation: an object of the class is made of the values of its fields."""

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        fields = handler.generate_schema(_typed_dict_of(source))
        return core_schema.no_info_after_validator_function(functools.partial(_make, source), fields)


class _InOrder:
    """Annotation: a union tries its members in their order. A `Field` that says so cannot be pickled."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return cast("CoreSchema", {**handler(source), "mode": "left_to_right"})


_BY_FIELDS: Final = _ByFields()


@attrs.frozen
class _Field:
    """A field of a class, by the name that its constructor takes."""

    name: str
    annotation: object
    required: bool = True
    default: object = NO_DEFAULT


def typed_dict(name: str, fields: Mapping[str, object], doc: str | None = None) -> type:
    """Return a TypedDict, which pydantic reads on every Python."""
    create = cast("Callable[[str, Mapping[str, object]], type]", TypedDict)
    made = create(name, fields)
    made.__doc__ = doc
    made.__pydantic_config__ = STRICT  # type: ignore[attr-defined]  # where pydantic looks for it
    return made


def readable(annotation: object) -> Any:
    """Return an annotation whose classes pydantic can read, and whose texts are descriptions."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation) or annotation
    if origin is Annotated:
        texts = " ".join(each for each in arguments[1:] if isinstance(each, str))
        shown = [Shown({"description": texts})] if texts else []
        rest = [each for each in arguments[1:] if not isinstance(each, str)]
        return Annotated[(readable(arguments[0]), *rest, *shown)]
    if origin in (collections.abc.Iterable, collections.abc.Collection):
        return list[tuple(map(readable, arguments))] if arguments else list  # type: ignore[misc]
    if origin is Literal:
        return Annotated[annotation, BeforeValidator(functools.partial(_same, arguments))]
    if origin in (Union, types.UnionType):
        return _union([readable(each) for each in arguments])
    if arguments and origin is not collections.abc.Callable:
        return _with_arguments(annotation, arguments, tuple(map(readable, arguments)))
    return Annotated[annotation, _BY_FIELDS] if _is_replaced(annotation) else annotation


def _with_arguments(annotation: Any, old: tuple[object, ...], new: tuple[Any, ...]) -> Any:
    if old == new:
        return annotation
    return typing.get_origin(annotation)[new]


def _same(choices: Sequence[object], value: object) -> object:
    # JSON schema counts 1.0 as 1, and Python code that compares types does not; True is no 1 for either.
    for each in choices:
        plain = each.value if isinstance(each, Enum) else each
        if plain == value and isinstance(plain, bool) == isinstance(value, bool):
            return each
    return value


def _union(members: Sequence[object]) -> Any:
    """Return a union in which a text that names a member of an Enum becomes this member and stays no text."""
    enums = [each for each in members if inspect.isclass(each) and issubclass(each, Enum)]
    rest = tuple(each for each in members if each not in enums)
    if not enums or rest in ((), (types.NoneType,)):
        return Union[tuple(members)]  # noqa: UP007 - the members are known at run time only
    # The annotation keeps the others one member, in which pydantic finds the best fit.
    others: object = Annotated[(Union[tuple(rest)], Shown({}))]  # noqa: UP007 - known at run time only
    return Annotated[Union[(*enums, others)], _InOrder()]


def _is_replaced(annotation: object) -> bool:
    if not isinstance(annotation, type):
        return False
    if _is_foreign(annotation):
        return True
    return dataclasses.is_dataclass(annotation) and any(map(_is_foreign, _classes_in(annotation)))


def _is_foreign(kind: type) -> bool:
    """Return whether pydantic refuses a class."""
    if hasattr(kind, "__get_pydantic_core_schema__"):
        return False
    return attrs.has(kind) or (typing.is_typeddict(kind) and not _is_read(kind))


def _is_read(typed_dict_class: type) -> bool:
    """Return whether a TypedDict has the metaclass that pydantic accepts on this Python."""
    return type(typed_dict_class) is type(_PROBE)


_PROBE = typed_dict("Probe", {})


def _classes_in(kind: type) -> set[type]:
    """Return the classes in the fields of a class, also in the fields of those."""
    found: set[type] = set()
    waiting = [kind]
    while waiting:
        hints = typing.get_type_hints(waiting.pop())
        new = {each for hint in hints.values() for each in _parts(hint)} - found
        found |= new
        waiting.extend(each for each in new if dataclasses.is_dataclass(each))
    return found


def _parts(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        yield annotation
    for each in typing.get_args(annotation):
        yield from _parts(each)


@functools.lru_cache(maxsize=1024)  # also because pydantic knows a type that contains itself by its identity
def _typed_dict_of(kind: type) -> type:
    return typed_dict(kind.__name__, {each.name: _field_type(each) for each in _fields(kind)}, _doc_of(kind))


def _doc_of(kind: type) -> str | None:
    # Python writes a signature into the docstring of a dataclass that has none.
    doc = kind.__doc__
    return None if doc and dataclasses.is_dataclass(kind) and doc.startswith(f"{kind.__name__}(") else doc


def _fields(kind: type) -> Iterator[_Field]:
    hints = typing.get_type_hints(kind, include_extras=True)
    if typing.is_typeddict(kind):
        required = cast("frozenset[str]", kind.__required_keys__)  # type: ignore[attr-defined]
        for name, hint in hints.items():
            yield _Field(name, *_unqualified(hint, name in required))
    elif attrs.has(kind):
        for each in attrs.fields(kind):
            if each.init:
                has_value = each.default is not attrs.NOTHING and not isinstance(each.default, _FACTORY)
                default = each.default if has_value else NO_DEFAULT
                yield _Field(each.alias or each.name, hints.get(each.name, Any), each.default is attrs.NOTHING, default)
    else:
        for field in dataclasses.fields(kind):
            if field.init:
                default = field.default if field.default is not dataclasses.MISSING else NO_DEFAULT
                is_required = default is NO_DEFAULT and field.default_factory is dataclasses.MISSING
                yield _Field(field.name, hints[field.name], is_required, default)


def _unqualified(hint: object, is_required: bool) -> tuple[Any, bool]:
    """Return the type of a key of a TypedDict; Python itself misses `NotRequired` in annotations that are texts."""
    while (origin := typing.get_origin(hint)) in (NotRequired, Required, ReadOnly):
        is_required = is_required if origin is ReadOnly else origin is Required
        hint = typing.get_args(hint)[0]
    return hint, is_required


def _field_type(field: _Field) -> object:
    shown = shown_default(field.default)
    annotation = readable(field.annotation)
    if shown:
        annotation = Annotated[annotation, Shown(shown)]
    return annotation if field.required else NotRequired[annotation]


def _make(kind: type, values: dict[str, object]) -> object:
    if typing.is_typeddict(kind):
        return values
    try:
        return kind(**values)
    except TypeError as error:  # pydantic expects a ValueError of a check, and attrs raises TypeError for a wrong type
        raise ValueError(str(error)) from error
