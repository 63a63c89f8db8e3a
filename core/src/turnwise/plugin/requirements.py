"""Installed distributions: the plugins that they name, and the packages that they require and that are missing."""

from __future__ import annotations

import email
import os
import re
import sys
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Final

from attrs import define, evolve, field, frozen

GROUP: Final = "turnwise"
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*")
_SEPARATORS: Final = re.compile(r"[-_.]+")


@frozen
class DistributionFacts:
    """Name, version and requirements of a distribution; a name and a version that its metadata lack are empty."""

    name: str = ""
    version: str = ""
    requirements: tuple[str, ...] = ()


@define(eq=False)
class InstalledDistributions:
    """
    The installed distributions.

    `importlib.metadata` reads a distribution's metadata for each question. Here they are read at the first one, so
    an object is for one list of plugins: it does not see what is installed later.
    """

    _facts: dict[str, DistributionFacts | None] = field(factory=dict, init=False)
    _unmet: dict[str, str] = field(factory=dict, init=False)

    def describe(self, distribution: Distribution | None) -> DistributionFacts:
        """Return the facts of a distribution; all of them are empty for None, an entry point without one."""
        if distribution is None:
            return DistributionFacts()
        facts = read_facts(distribution)
        self._facts.setdefault(_normalized(facts.name), facts)
        return facts

    def find(self, name: str) -> DistributionFacts | None:
        """Return the facts of the distribution that Python finds by this name."""
        key = _normalized(name)
        if key not in self._facts:
            self._facts[key] = next(map(read_facts, distributions(name=name)), None)
        return self._facts[key]

    def unmet_requirements(self, name: str, only: str = "") -> Iterator[str]:
        """
        Yield what the requirements of a distribution lack, with the hint: one text for each requirement.

        Args:
            name: of an installed distribution; empty for one that is not known, which lacks nothing.
            only: checks the requirements of one distribution; empty checks all.
        """
        facts = self.find(name) if name else None
        for text in facts.requirements if facts else ():
            found = _NAME.match(text)
            if only and (found is None or found[0] != only):
                continue
            if text not in self._unmet:  # most plugins require the same versions
                self._unmet[text] = self._describe_unmet(text)
            if self._unmet[text]:
                yield self._unmet[text]

    def _describe_unmet(self, text: str) -> str:
        from packaging.requirements import Requirement

        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            return ""
        wanted = f"{requirement.name}{requirement.specifier}"
        found = self.find(requirement.name)
        if found is not None and requirement.specifier.contains(found.version, prereleases=True):
            return ""
        here = f"{found.version} is installed" if found else "it is not installed"
        return f"{wanted}, and {here}: pip install '{wanted}'"

    def install_hint(self, part: str) -> str:
        """Return the end of an error text: the missing package that turnwise's extra with a part's name requires."""
        missing = [package + extras for package, extras in self._packages_of(part) if self.find(package) is None]
        return f"; to install it: pip install '{missing[0]}'" if missing else ""

    def load_hint(self, part: str, skipped: Sequence[str]) -> str:
        """Return a part of an error text: the plugin that has a part, or all of them if no extra names its package."""
        packages = [package for package, _extras in self._packages_of(part)]
        points = [point for point in plugin_points() if point.name in skipped]
        owners = [point.name for point in points if self.describe(point.dist).name in packages]
        return f"; installed but not loaded: {', '.join(owners or skipped)}" if skipped else ""

    def _packages_of(self, part: str) -> list[tuple[str, str]]:
        extra = part.replace("_", "-")
        pattern = re.compile(rf"""(turnwise-[\w-]+)(\[[\w,-]+\])?.*; extra == ['"]{re.escape(extra)}['"]""")
        core = self.find("turnwise")
        lines = core.requirements if core else ()
        return [(match[1], match[2] or "") for line in lines if (match := pattern.fullmatch(line))]


def _normalized(name: str) -> str:
    return _SEPARATORS.sub("-", name).lower()


def plugin_points() -> list[EntryPoint]:
    """Return the entry points of all installed plugins."""
    # The files are read at each call: one may have changed in its place. Only which of the distributions have plugins
    # is kept: most have none, and a search of all of them takes ten times as long.
    return [
        point for each in _plugin_distributions(_state_of_path()) for point in each.entry_points if point.group == GROUP
    ]


@lru_cache(maxsize=1)
def _plugin_distributions(_state: Hashable) -> tuple[Distribution, ...]:
    found = (point.dist for point in entry_points(group=GROUP))
    return tuple({id(each): each for each in found if each is not None}.values())


def _state_of_path() -> Hashable:
    """Return what changes when a distribution is installed or removed; `importlib.metadata` trusts the same times."""
    return (*((path, _state_of(path)) for path in sys.path), *sys.meta_path)


def _state_of(path: str) -> Hashable:
    try:
        found = os.stat(path or ".")
    except OSError:  # it need not exist
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def read_facts(distribution: Distribution) -> DistributionFacts:
    """Read the metadata of a distribution; both files are those of `importlib.metadata`."""
    facts = _parse_facts(distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "")
    if not facts.requirements and distribution.read_text("requires.txt"):
        # of a distribution in the older form, an .egg-info folder
        return evolve(facts, requirements=tuple(distribution.requires or ()))
    return facts


@lru_cache(maxsize=512)
def _parse_facts(text: str) -> DistributionFacts:
    # Only the header: the page after it takes most of the time of the parser.
    metadata = email.message_from_string(text.partition("\n\n")[0])
    requirements = metadata.get_all("Requires-Dist") or ()
    return DistributionFacts(metadata["Name"] or "", metadata["Version"] or "", tuple(requirements))
