"""Hints for unknown keys, from the classes of the config: the key that a user may have meant, in any section."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Union, get_args, get_origin

import attrs

from turnwise.config.parts import Choice, TypeForm, file_fields
from turnwise.config.run import RunConfig
from turnwise.plugin.registry import closest, did_you_mean
from turnwise.plugin.requirements import InstalledDistributions


def hint_for(key: str, path: str, section: type) -> str:
    """
    Return the end of an error text about an unknown key.

    Args:
        key: as the user wrote it.
        path: of its section in the config; empty for the whole config.
        section: class of the section.
    """
    known = tuple(item.name for item in file_fields(section))
    name, colon, _ = key.partition(":")
    if colon and name in known:
        return "; write a space behind each colon"
    if not path and section is RunConfig and (missing := InstalledDistributions().install_hint(key)):
        return missing  # the section of a plugin that is not installed
    for places in (_places_below(section, path), _places_below(RunConfig, "") if path or section is RunConfig else ()):
        # The key of another section is surely meant if its name is the same; a name of this section may be a guess.
        same = [place for place in places if place.rpartition(".")[2] == key]
        if same:
            return f"; did you mean {min(same, key=lambda place: _distance(place, path))!r}?"
    if not known:
        return "; there are no options"
    if closest(key, known) is None and path:
        names: dict[str, str] = {}
        for place in sorted(_places_below(RunConfig, ""), key=lambda place: _distance(place, path)):
            names.setdefault(place.rpartition(".")[2], place)
        if (close := closest(key, tuple(names), cutoff=0.8)) is not None:
            return f"; did you mean {names[close]!r}?"
    return did_you_mean(key, known)


def _distance(place: str, path: str) -> int:
    """Return how many keys lead from one section to the other."""
    first, second = place.split(".")[:-1], path.split(".") if path else []
    shared = sum(1 for one, other in zip(first, second, strict=False) if one == other)
    return len(first) + len(second) - 2 * shared


@cache
def _places_below(section: type, path: str) -> tuple[str, ...]:
    return tuple(_walk(section, path))


def _walk(section: type, path: str) -> Iterator[str]:
    """Yield the places of all keys below a section; the keys of plugins' options are not known here."""
    for item in file_fields(section):
        place = f"{path}.{item.name}" if path else item.name
        yield place
        for kind in _members(item.type):
            if isinstance(kind, type) and attrs.has(kind) and not issubclass(kind, Choice):
                yield from _walk(kind, place)


def _members(kind: TypeForm) -> tuple[Any, ...]:
    origin: TypeForm = get_origin(kind)
    return get_args(kind) if origin in (Union, types.UnionType) else (kind,)
