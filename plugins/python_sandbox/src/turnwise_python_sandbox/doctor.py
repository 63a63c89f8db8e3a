"""What isolation this machine offers, in words and in JSON."""

from __future__ import annotations

import sys
from typing import Any, Final

from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.result import SandboxUnavailableError, Tier
from turnwise_python_sandbox.selftest import Trial, make_recipe, try_tier

PROMISES: Final = {
    Tier.NAMESPACES: (
        "no file of the host but Python and the system's libraries can be read, none written; no network; no process "
        "seen, signalled or started; nothing survives a run; time, memory, output and files are limited"
    ),
    Tier.LANDLOCK: (
        "as tier 1, but: whether a path exists and how long a file is can be found out, contents cannot; the host's "
        "name is seen; files are limited by looking ten times a second; more of the kernel can be reached"
    ),
    Tier.SEATBELT: (
        "macOS, for development: writes and network are denied by sandbox-exec; memory is not limited, processes are "
        "not hidden, Apple has marked it deprecated"
    ),
    Tier.UNSAFE_SUBPROCESS: "none: a time limit and rlimits; the code can read and change what its user can",
}


def report() -> dict[str, Any]:
    """
    Try the tiers of this platform.

    Returns:
        JSON values: ``default_tier`` (number or null), ``tiers`` (a list of objects) and ``lines`` (for people).
    """
    rows = [_row(trial) for trial in _trials()]
    usable = [row["tier"] for row in rows if row["works"]]
    lines = [line for row in rows for line in _lines(row)]
    end = f"runs use tier {usable[0]}" if usable else "no tier works: runs are refused unless unsafe_subprocess is true"
    return {"default_tier": usable[0] if usable else None, "tiers": rows, "lines": [*lines, end]}


def _trials() -> list[Trial]:
    if sys.platform == "darwin":
        return [Trial(tier=Tier.SEATBELT)]
    return [_try(tier) for tier in (Tier.NAMESPACES, Tier.LANDLOCK)]


def _try(tier: Tier) -> Trial:
    try:
        return try_tier(make_recipe(SandboxConfig(), tier))
    except SandboxUnavailableError as error:
        return Trial(tier=tier, reason=str(error))


def _row(trial: Trial) -> dict[str, Any]:
    return {
        "tier": int(trial.tier),
        "name": trial.tier.name.lower(),
        "works": not trial.reason,
        "reason": trial.reason,
        "landlock_abi": trial.landlock_abi,
        "promise": PROMISES[trial.tier],
    }


def _lines(row: dict[str, Any]) -> list[str]:
    state = f"works (Landlock ABI {row['landlock_abi']})" if row["works"] else f"does not work: {row['reason']}"
    return [f"tier {row['tier']} ({row['name']}): {state}", f"  promises: {row['promise']}"]
