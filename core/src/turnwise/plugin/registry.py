"""Registries of factories by name: the typed object that each registration hook receives."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from attrs import define, field, frozen

from turnwise.errors import DuplicateNameError, PluginError
from turnwise.protocols import Resources

T = TypeVar("T")
Factory = Callable[[Any, Resources], T]
"""Called with an instance of the entry's config class and the run's resources; a class with that `__init__` fits."""


@frozen
class NoConfig:
    """Config of a plugin that has no options."""


@frozen(kw_only=True)
class Entry(Generic[T]):
    """
    One registered name.

    Attributes:
        name: its name in configs.
        factory: builds it.
        config: attrs class of its options.
        owner: entry-point name of the plugin that registered it.
        enabled_if: of an observer: returns whether a run has it although its config does not name it.
    """

    name: str
    factory: Factory[T]
    config: type
    owner: str
    enabled_if: Callable[[], bool] | None = None


@define
class Registry(Generic[T]):
    """
    The registered names of one kind, filled by one hook.

    Attributes:
        kind: of its entries, in the singular, for error texts.
    """

    kind: str
    _entries: dict[str, Entry[T]] = field(factory=dict, init=False)
    _owner: str = field(default="", init=False)

    def add(
        self, name: str, factory: Factory[T], config: type = NoConfig, *, enabled_if: Callable[[], bool] | None = None
    ) -> None:
        """
        Register a factory.

        Args:
            name: its name in configs.
            factory: called as ``factory(config, resources)`` in every process that needs it.
            config: attrs class of its options, structured from the config section that names it.
            enabled_if: only for observers: called in each process that builds those of a run; True adds the observer,
                with its default options, to a run whose config does not name it.

        Raises:
            DuplicateNameError: another plugin has the name; the text names both.
            PluginError: `enabled_if` for something that is no observer.
        """
        if enabled_if is not None and self.kind != "observer":
            raise PluginError(f"{self.kind} {name!r}: only an observer can be registered with enabled_if")
        if name in self._entries:
            raise DuplicateNameError(
                f"{self.kind} {name!r} is registered by two plugins: {self._entries[name].owner!r} and {self._owner!r}"
            )
        self._entries[name] = Entry(name=name, factory=factory, config=config, owner=self._owner, enabled_if=enabled_if)

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """Attribute the registrations inside to a plugin, for the texts of conflicts."""
        self._owner, before = owner, self._owner
        try:
            yield
        finally:
            self._owner = before

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> tuple[str, ...]:
        """Return the names, sorted."""
        return tuple(sorted(self._entries))

    def entries(self) -> Mapping[str, Entry[T]]:
        """Return the entries by name, sorted."""
        return {name: self._entries[name] for name in self.names()}

    def get(self, name: str) -> Entry[T]:
        """Return an entry; `PluginError` with the closest or all registered names when it is missing."""
        if name in self._entries:
            return self._entries[name]
        raise PluginError(f"unknown {self.kind} {name!r}{did_you_mean(name, self.names())}")


def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """Return the end of an error text: the closest known name, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else "; none is installed"
