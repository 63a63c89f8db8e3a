"""Packages that distributions require and that are not installed, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import distributions, requires

from packaging.requirements import Requirement


def unmet_requirements(name: str, only: str = "") -> Iterator[str]:
    """
    Yield what the requirements of a distribution lack, with the remedy: one text for each requirement.

    Args:
        name: of an installed distribution; empty for one that is not known, which lacks nothing.
        only: checks the requirements of one distribution; empty checks all.
    """
    for text in (requires(name) if name else None) or ():
        if only and not text.startswith(only):
            continue
        requirement = Requirement(text)
        if (only and requirement.name != only) or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        found = [each.version for each in distributions(name=requirement.name)]
        if not found or not requirement.specifier.contains(found[0], prereleases=True):
            here = f"{found[0]} is installed" if found else "it is not installed"
            yield f"{wanted}, and {here}: pip install '{wanted}'"


def install_hint(part: str) -> str:
    """Return the end of an error text: the missing package that turnwise's extra with the name of a part requires."""
    extra = part.replace("_", "-")
    pattern = re.compile(rf"""(turnwise-[\w-]+)(\[[\w,-]+\])?.*; extra == ['"]{re.escape(extra)}['"]""")
    found = [match for line in requires("turnwise") or () if (match := pattern.fullmatch(line))]
    missing = [f"{match[1]}{match[2] or ''}" for match in found if not any(distributions(name=match[1]))]
    return f"; to install it: pip install '{missing[0]}'" if missing else ""
