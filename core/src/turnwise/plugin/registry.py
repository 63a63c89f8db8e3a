"""Registries of factories by name: the typed object that each registration hook receives."""

from __future__ import annotations

import difflib
import re
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

from attrs import define, field, frozen

from turnwise.errors import DuplicateNameError, PluginError
from turnwise.protocols import Resources
from turnwise.record.column_specs import TAKEN

T = TypeVar("T")
_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.-]*")
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
        reads_weights: of an engine: it reads the weights of the run's model.
    """

    name: str
    factory: Factory[T]
    config: type
    owner: str
    enabled_if: Callable[[], bool] | None = None
    reads_weights: bool = True


@define
class Registry(Generic[T]):
    """
    The registered names of one kind, filled by one hook.

    Attributes:
        kind: of its entries, in the singular, for error texts.
        contract: protocol or base class of the parts; None for one that is checked elsewhere.
    """

    kind: str
    contract: type | None = None
    _entries: dict[str, list[Entry[T]]] = field(factory=dict, init=False)  # several of one name are a conflict
    _owner: str = field(default="", init=False)

    def add(
        self,
        name: str,
        factory: Factory[T],
        config: type = NoConfig,
        *,
        enabled_if: Callable[[], bool] | None = None,
        reads_weights: bool = True,
    ) -> None:
        """
        Register a factory.

        Args:
            name: its name in configs.
            factory: called as ``factory(config, resources)`` in every process that needs it.
            config: attrs class of its options, structured from the config section that names it.
            enabled_if: only for observers: called in each process that builds those of a run; True adds the observer,
                with its default options, to a run whose config does not name it.
            reads_weights: only for engines: False for one that samples elsewhere, such as a client of a server. Then
                the weights of a model on the hub are not downloaded.

        Raises:
            PluginError: the name is none or one of the core's columns, the plugin registers it twice, `enabled_if` is
                given for something that is no observer, or `reads_weights` for something that is no engine.
        """
        if enabled_if is not None and self.kind != "observer":
            raise PluginError(f"{self.kind} {name!r}: only an observer can be registered with enabled_if")
        if not reads_weights and self.kind != "engine":
            raise PluginError(f"{self.kind} {name!r}: only an engine can be registered with reads_weights")
        if self.kind == "column" and name in TAKEN:
            raise PluginError(f"column {name!r}: every record or batch has something of that name; choose another")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(
                f"{self.kind} {name!r}: a name has letters, digits and . _ - and starts with no dot or dash"
            )
        if self._owner in self.owners(name):
            raise PluginError(f"{self.kind} {name!r} is registered twice")
        entry = Entry(
            name=name,
            factory=factory,
            config=config,
            owner=self._owner,
            enabled_if=enabled_if,
            reads_weights=reads_weights,
        )
        self._entries.setdefault(name, []).append(entry)

    def remove(self, owner: str) -> None:
        kept = {name: [each for each in found if each.owner != owner] for name, found in self._entries.items()}
        self._entries = {name: found for name, found in kept.items() if found}

    def of(self, owner: str) -> list[Entry[T]]:
        """Return what a plugin has registered, sorted by name."""
        return [each for name in self.names() for each in self._entries[name] if each.owner == owner]

    def owners(self, name: str) -> tuple[str, ...]:
        """Return the plugins that registered a name: two or more are a conflict, and none of them has the name."""
        return tuple(entry.owner for entry in self._entries.get(name, ()))

    def check(self, part: object) -> None:
        """Raise `PluginError` for a part that does not fulfil the contract."""
        if mismatch := self.mismatch(part):
            raise PluginError(f"its factory returned {mismatch}")

    def mismatch(self, part: object) -> str:
        """Return the type of a part and the attributes that its contract misses in it; empty for a good part."""
        contract = self.contract
        if isinstance(part, tuple):  # the tools of a server
            return next(filter(None, map(self.mismatch, part)), "")
        if contract is None or isinstance(part, contract):
            return ""
        names = sorted({*contract.__annotations__, *vars(contract)})
        missing = [name for name in names if not name.startswith("_") and not hasattr(part, name)]
        lacks = f", which has no {', '.join(missing)}" if missing and issubclass(type(contract), ABCMeta) else ""
        package = contract.__module__.partition(".")[0]
        return f"{type(part).__name__}{lacks}; expected {package}.{contract.__name__}"

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
        return tuple(sorted(self._entries))

    def entries(self) -> Mapping[str, Entry[T]]:
        """Return the entries by name, sorted, without those in conflict."""
        return {name: self._entries[name][0] for name in self.names() if len(self._entries[name]) == 1}

    def get(self, name: str) -> Entry[T]:
        """
        Return an entry.

        Raises:
            PluginError: the name is missing; the text has the closest or all registered names.
            DuplicateNameError: several plugins registered the name.
        """
        found = self._entries.get(name, [])
        if len(found) > 1:
            owners = " and ".join(map(repr, self.owners(name)))
            raise DuplicateNameError(f"{self.kind} {name!r} is registered by several plugins: {owners}")
        if not found:
            raise PluginError(f"unknown {self.kind} {name!r}{did_you_mean(name, self.names())}")
        return found[0]


def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """Return the end of an error text: the closest known name, or all of them."""
    close = closest(name, known)
    if close is not None:
        return f"; did you mean {close!r}?"
    return f"; known: {', '.join(known)}" if known else "; none is installed"


def closest(name: str, known: tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like a name; None if none is."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=cutoff)
    # Swapped letters are the most common mistake, and difflib takes them for two.
    return next((each for each in close if sorted(each) == sorted(name)), close[0] if close else None)
