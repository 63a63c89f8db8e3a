"""
The keys of a run's config with values of each, read off the config classes.

The values are the documented ones: both of a bool, all of a choice of words, null where a key takes it, and for a
number its bound and another valid number. A key of free form has its values in `option_table`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from attrs import frozen

from turnwise.config.parts import KIND, Choice, ToolChoice, file_fields
from turnwise.config.run import RunConfig
from turnwise.config.structuring import default_of
from turnwise.plugin.host import Host

Path = tuple[str | int, ...]
"""Keys from the root of a config to a value; a number is a place in a list."""


@frozen
class Key:
    """
    A key of a config.

    Attributes:
        name: as texts show it: `rollout.n`, or `agents/tool_agent.system_prompt` for an option of a part.
        path: of its value.
        values: valid values, or None for a key of free form.
        mismatches: values that the config must refuse.
    """

    name: str
    path: Path
    values: tuple[Any, ...] | None
    mismatches: tuple[Any, ...] = ()


def places() -> dict[str, Path]:
    """Return, for each kind of part, the path of its first place in a config."""
    found: dict[str, Path] = {}
    for item in attrs.fields(RunConfig):
        if KIND in item.metadata and item.name != "judge":
            found.setdefault(item.metadata[KIND], (item.name,))
    return {**found, "middleware": ("middleware",)}  # the section of a plugin, which lists parts of its kind


def keys_of_sections(kind: type = RunConfig, name: str = "", path: Path = ()) -> Iterator[Key]:
    """Yield the keys of a config class and of the sections in it; parts are left to `keys_of_parts`."""
    for item in file_fields(kind):
        inner_name, inner_path = f"{name}.{item.name}".lstrip("."), (*path, item.name)
        if section := _section(item.type):
            yield from _optional_section(item, inner_name, inner_path)
            yield from keys_of_sections(section, inner_name, inner_path)
        elif (element := _element(item.type)) and attrs.has(element) and not issubclass(element, Choice):
            yield Key(inner_name, inner_path, None)
            yield from keys_of_sections(element, inner_name, (*inner_path, 0))
        elif not _holds_choices(item.type):
            yield _key(item, inner_name, inner_path)


def keys_of_parts(host: Host) -> Iterator[tuple[str, str, list[Key]]]:
    """Yield each registered part that a config can name, as its kind, its name and the keys of its options."""
    for kind, place in places().items():
        for entry in host.registry(kind).entries().values():
            listed = kind in ("tools", "observers", "middleware", "postprocessors")
            path = (*place, entry.name) if listed else place
            yield kind, entry.name, list(keys_of_sections(entry.config, f"{kind}/{entry.name}", path))


def _section(kind: Any) -> type | None:
    """Return the class of a section, also of one that may be null; None for any other type."""
    for member in _members(kind):
        if attrs.has(member) and not issubclass(member, Choice):
            return member
    return None


def _optional_section(item: attrs.Attribute[Any], name: str, path: Path) -> Iterator[Key]:
    if type(None) in get_args(item.type):
        yield Key(name, path, (None,))


def _members(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) in (Union, types.UnionType):
        return get_args(kind)
    return (kind,)


def _element(kind: Any) -> type | None:
    """Return the class of the items of a list, or of the values of a mapping by free names."""
    arguments = get_args(kind)
    if get_origin(kind) is tuple and isinstance(arguments[0], type):
        return arguments[0]
    return None


def _holds_choices(kind: Any) -> bool:
    return kind in (Choice, ToolChoice) or any(map(_holds_choices, get_args(kind)))


def _key(item: attrs.Attribute[Any], name: str, path: Path) -> Key:
    found: list[Any] = []
    mismatches: list[Any] = []
    is_free = False
    for member in _members(item.type):
        values, wrong = _values(member, item)
        found += values or ()
        mismatches += wrong
        is_free |= values is None
    return Key(name, path, None if is_free else tuple(found), tuple(mismatches))


def _values(kind: Any, item: attrs.Attribute[Any]) -> tuple[list[Any] | None, list[Any]]:
    """Return valid values of one type, None for one of free form, and values that do not fit."""
    if kind is type(None):
        return [None], []
    if kind is bool:
        return [True, False], ["yes"]
    if get_origin(kind) is Literal:
        return list(get_args(kind)), ["no such word"]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [each.value for each in kind], ["no such word"]
    if kind in (int, float):
        return _numbers(kind, item)
    return None, []


def _numbers(kind: type, item: attrs.Attribute[Any]) -> tuple[list[Any], list[Any]]:
    bounds = dict(_bounds(item.validator))
    default: Any = default_of(item)
    step = 1 if kind is int else 0.5
    low = bounds.get(">=", bounds.get(">"))
    if not isinstance(default, int | float) or isinstance(default, bool):
        default = (low or 0) + 2 * step
    high = bounds.get("<=", bounds.get("<", float("inf")))
    other = default + step if default + step < high else ((low or 0) + high) / 2
    values, mismatches = [kind(other)], []
    if ">=" in bounds:
        values.append(kind(low))
        mismatches.append(kind(low - 1))
    elif ">" in bounds:
        values.append(kind(default / 2 or step))
        mismatches.append(kind(low))
    if "<=" in bounds:
        values.append(kind(bounds["<="]))
        mismatches.append(kind(bounds["<="] + 1))
    return values, mismatches or ["one"]


def _bounds(validator: Any) -> Iterator[tuple[str, Any]]:
    if (operator := getattr(validator, "compare_op", None)) is not None:
        yield operator, validator.bound
    for each in (*getattr(validator, "_validators", ()), getattr(validator, "validator", None)):
        if each is not None:
            yield from _bounds(each)


def patch(path: Path, value: Any) -> dict[Path, Any]:
    """Return the change of one value; a mapping is its leaves, so that changes of different keys can be joined."""
    if isinstance(value, Mapping) and value:
        return {key: leaf for name, item in value.items() for key, leaf in patch((*path, name), item).items()}
    return {path: value}
