"""
Converts plain values to config classes and back, strictly; errors name the path, the value and the expected type.

Strict means that nothing is guessed: text is not read as a number, true is not 1, a text is not a list of letters, and
an unknown key is an error. The one conversion is from a whole number to a float. All errors of a value are reported,
one a line. `turnwise.plugin.host` uses this for the options of plugins too.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, overload

import attrs
from cattrs import Converter
from cattrs.cols import is_mapping, mapping_structure_factory
from cattrs.errors import IterableValidationError, IterableValidationNote, StructureHandlerNotFoundError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from turnwise.config.errors import (
    MISMATCHES,
    MismatchAtKeyError,
    dotted,
    is_enum,
    is_list,
    is_literal,
    mismatch,
    mismatch_lines,
    shown,
)
from turnwise.config.parts import FILE_END, IN_FILE, Choice, CodePlace, ToolChoice, TypeForm, file_fields, plain
from turnwise.config.runtime import RuntimeConfig
from turnwise.errors import ConfigError, PluginError
from turnwise.files import expanded
from turnwise.plugin.registry import did_you_mean
from turnwise.types import JsonDict, JsonObject

T = TypeVar("T")
Structure = Callable[[object, object], object]


@overload
def structure(data: object, kind: type[T], *, path: str = ..., base_dir: Path | None = ...) -> T: ...
@overload
def structure(data: object, kind: TypeForm, *, path: str = ..., base_dir: Path | None = ...) -> Any: ...
def structure(data: object, kind: TypeForm, *, path: str = "", base_dir: Path | None = None) -> object:
    """
    Make an object of a config class, or of any type that a field of one may have, from plain values.

    Args:
        data: plain values, as a file holds them.
        kind: the class or type, such as a plugin's config class.
        path: place of `data` in the config, for error texts.
        base_dir: folder that relative `pathlib.Path` values start from; None leaves them as they are.

    Raises:
        ConfigError: it does not fit; one line for each mismatch.
        PluginError: `kind` holds a type that no config value can have.
    """
    try:
        return _converter(base_dir).structure(data, kind)
    except StructureHandlerNotFoundError as error:
        raise PluginError(f"{dotted(path, '')}{kind} cannot be read from a config: {error}") from error
    except MISMATCHES as error:
        raise ConfigError("\n".join(mismatch_lines(error, path, kind))) from error


def unstructure(value: object) -> Any:
    """Return an object of a config class as plain JSON values; `PluginError` for a value that JSON cannot hold."""
    try:
        return plain(_converter(None).unstructure(value))
    except ValueError as error:
        raise PluginError(f"{type(value).__name__} cannot be written as a config: {error}") from error


# Paths are relative to the config file, so there is one converter for each of its folders.
@lru_cache(maxsize=16)
def _converter(base_dir: Path | None) -> Converter:
    converter = Converter(forbid_extra_keys=True, unstruct_collection_overrides={Sequence: list, AbstractSet: sorted})
    for kind in (bool, int, float, str):
        converter.register_structure_hook(kind, _structure_scalar)
    converter.register_structure_hook(Path, lambda value, _: _structure_path(value, base_dir))
    converter.register_structure_hook_func(
        lambda kind: kind is CodePlace, lambda value, _: _structure_place(value, base_dir)
    )
    converter.register_structure_hook(Choice, _structure_choice)
    converter.register_unstructure_hook_factory(
        attrs.has, lambda kind: make_dict_unstructure_fn(kind, converter, **_omitted(kind))
    )
    converter.register_unstructure_hook(Choice, lambda choice: {"name": choice.name, **choice.options})
    converter.register_unstructure_hook(ToolChoice, _plain_tool)
    # Later registrations are asked first.
    converter.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
    converter.register_structure_hook_factory(attrs.has, lambda kind: _class_hook(kind, converter, base_dir))
    converter.register_structure_hook_func(is_enum, _structure_scalar)
    converter.register_structure_hook_func(is_literal, lambda value, kind: _one_of(value, get_args(kind), kind))
    converter.register_structure_hook_factory(is_list, lambda kind: _list_hook(kind, converter))
    converter.register_structure_hook_factory(is_mapping, lambda kind: _mapping_hook(kind, converter))
    converter.register_structure_hook_factory(_is_alternative, lambda kind: _alternative_hook(kind, converter))
    converter.register_structure_hook(ToolChoice, _structure_tool)
    runtime = _class_hook(RuntimeConfig, converter, base_dir)
    converter.register_structure_hook(
        RuntimeConfig, lambda value, kind: runtime({"name": value} if isinstance(value, str) else value, kind)
    )
    return converter


def _plain_tool(tool: ToolChoice) -> JsonDict:
    return {"name": tool.name, **tool.options, **({} if tool.schema is None else {"schema": plain(tool.schema)})}


def _is_alternative(kind: object) -> bool:
    """Return whether it is a union of more than one type besides null; cattrs does the others well."""
    return get_origin(kind) in (Union, types.UnionType) and len(set(get_args(kind)) - {type(None)}) > 1


def _structure_scalar(value: object, kind: object) -> object:
    # An enum of text is a subclass of str, so cattrs may bring it here as one.
    if is_enum(kind):
        return kind(_one_of(value, tuple(member.value for member in kind), kind))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        quotes = "; put it in quotes" if kind is str and type(value) in (bool, int, float) else ""
        raise mismatch(kind, value, quotes)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value}")
    return value


def _one_of(value: object, allowed: tuple[object, ...], kind: object) -> object:
    for member in allowed:
        # True == 1, and neither is the other here.
        if type(value) is type(member) and value == member:
            return member
    names = tuple(str(member) for member in allowed)
    hint = did_you_mean(value, names) if isinstance(value, str) else ""
    raise mismatch(kind, value, hint if "did you mean" in hint else "")


def _structure_path(value: object, base_dir: Path | None) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise mismatch(Path, value)
    return expanded(value) if base_dir is None else base_dir / expanded(value)


def _structure_place(value: object, base_dir: Path | None) -> str:
    if not isinstance(value, str):
        raise mismatch(str, value)
    home, colon, name = value.rpartition(":")
    if base_dir is None or not home.endswith(FILE_END):
        return value
    return f"{base_dir / expanded(home)}{colon}{name}"


def _structure_choice(value: object, _kind: object) -> Choice:
    if isinstance(value, str):
        return Choice(value)
    if not isinstance(value, Mapping):
        raise mismatch(Choice, value)
    if "name" not in value:
        joined = any(isinstance(key, str) and key.startswith("name:") for key in value)
        hint = "; write a space behind each colon" if joined else ""
        raise MismatchAtKeyError("name", f"missing; the section has only {_keys(value)}{hint}")
    if not isinstance(value["name"], str):
        raise MismatchAtKeyError("name", f"expected text, got {shown(value['name'])}")
    return Choice(value["name"], {key: item for key, item in value.items() if key != "name"})


def _structure_tool(value: object, _kind: object) -> ToolChoice:
    schema = value.get("schema") if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and "class_name" in value and "name" not in value:
        raise ValueError("an entry with class_name; write all such entries to a file, and name it in tools_file")
    if schema is not None and not isinstance(schema, Mapping):
        raise MismatchAtKeyError("schema", f"expected a section of keys, got {shown(schema)}")
    if isinstance(value, Mapping):
        value = {key: item for key, item in value.items() if key != "schema"}
    choice = _structure_choice(value, Choice)
    return ToolChoice(choice.name, choice.options, schema)


def _keys(value: JsonObject) -> str:
    return ", ".join(map(str, value)) or "no keys"


def _list_hook(kind: TypeForm, converter: Converter) -> Structure:
    origin: TypeForm = get_origin(kind) or kind
    build = tuple if origin is Sequence else frozenset if origin is AbstractSet else origin
    kinds = get_args(kind) or (Any, ...)
    fixed = origin is tuple and Ellipsis not in kinds

    def structure_list(value: object, _kind: object) -> object:
        if not isinstance(value, list | tuple | AbstractSet):
            raise mismatch(kind, value)
        if fixed and len(value) != len(kinds):
            raise ValueError(f"expected a list of {len(kinds)} items, got {shown(value)}")
        return build(_items(value, kinds if fixed else repeat(kinds[0]), converter))

    return structure_list


def _items(values: Iterable[object], kinds: Iterable[TypeForm], converter: Converter) -> list[object]:
    items: list[object] = []
    errors: list[Exception] = []
    for index, (value, kind) in enumerate(zip(values, kinds, strict=False)):
        try:
            items.append(converter.structure(value, kind))
        except MISMATCHES as error:
            error.add_note(IterableValidationNote(f"item {index}", index, kind))
            errors.append(error)
    if errors:
        raise IterableValidationError("list", errors, list)
    return items


def _mapping_hook(kind: TypeForm, converter: Converter) -> Structure:
    inner = mapping_structure_factory(kind, converter, structure_to=dict)

    def structure_mapping(value: object, _kind: object) -> object:
        if not isinstance(value, Mapping):
            raise mismatch(kind, value)
        return inner(value, kind)

    return structure_mapping


def _alternative_hook(kind: object, converter: Converter) -> Structure:
    members = set(get_args(kind))

    # The exact type first, so that 1 stays an integer where a float would do as well.
    def structure_alternative(value: object, _kind: object) -> object:
        if value is None and type(None) in members:
            return None
        for member in sorted(members - {type(None)}, key=lambda member: type(value) is not member):
            try:
                return converter.structure(value, member)
            except MISMATCHES:
                continue
        raise mismatch(kind, value)

    return structure_alternative


def _omitted(kind: type) -> Any:  # Any: mypy takes a ** for all of the keyword parameters
    return {item.name: override(omit=True) for item in attrs.fields(kind) if not item.metadata.get(IN_FILE, True)}


def _class_hook(kind: TypeForm, converter: Converter, base_dir: Path | None) -> Structure:
    fields = file_fields(kind)
    checked: Any = {item.name: override(struct_hook=_checked(item, converter)) for item in fields if item.validator}
    inner = make_dict_structure_fn(kind, converter, **checked, **_omitted(kind))
    sections = {item.name: own for item in fields if (own := _own_defaults(item, converter))}
    paths = {} if base_dir is None else _relative_defaults(fields, converter)

    def structure_class(value: object, _kind: object) -> object:
        if not isinstance(value, Mapping):
            empty = "; remove the key to use the defaults" if value is None else ""
            raise mismatch(kind, value, empty)
        partial = {name: own | value[name] for name, own in sections.items() if isinstance(value.get(name), Mapping)}
        return inner({**paths, **value, **partial}, kind)

    return structure_class


def _relative_defaults(fields: Iterable[attrs.Attribute[object]], converter: Converter) -> JsonDict:
    """Return the defaults that hold paths, as plain values: read like the file's own, they start from its folder."""
    defaults = {item.name: default_of(item) for item in fields}
    return {name: converter.unstructure(value) for name, value in defaults.items() if _holds_path(value)}


def default_of(item: attrs.Attribute[object]) -> object:
    """Return the default of a field; `attrs.NOTHING` when it has none, or one that depends on its object."""
    default: Any = item.default
    if hasattr(default, "factory"):
        return attrs.NOTHING if default.takes_self else default.factory()
    return default


def _holds_path(value: object) -> bool:
    if isinstance(value, Path):
        return True
    kind = type(value)
    if attrs.has(kind):
        return any(_holds_path(getattr(value, item.name)) for item in attrs.fields(kind))
    if isinstance(value, Mapping):
        return any(map(_holds_path, value.values()))
    return isinstance(value, list | tuple | AbstractSet) and any(map(_holds_path, value))


def _own_defaults(item: attrs.Attribute[object], converter: Converter) -> JsonDict:
    """Return the keys that a section has here and not by its class: a file that sets one of them leaves the others."""
    default = default_of(item)
    section = type(default)
    if not attrs.has(section) or section is Choice or item.type not in (section, section | None):
        return {}
    by_class = {each.name: each.default for each in file_fields(section)}
    return {key: value for key, value in plain(converter.unstructure(default)).items() if value != by_class[key]}


def _checked(item: attrs.Attribute[object], converter: Converter) -> Structure:
    """Validate a field where it is read: attrs itself stops at the first field that is wrong."""
    validator = item.validator

    def structure_field(value: object, _kind: object) -> object:
        result = converter.structure(value, item.type or Any)
        if validator is not None and item.converter is None:
            # A validator that looks at other fields has none here; attrs runs it again, on the whole object.
            with suppress(AttributeError):
                validator(None, item, result)
        return result

    return structure_field
