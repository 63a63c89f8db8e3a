"""The result of a run of code."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

from attrs import asdict, frozen

from turnwise.errors import InfrastructureError


class Status(StrEnum):
    """End of a run, as the supervisor decides it: from the wait status, never from the program's output."""

    OK = "ok"
    """Exit code 0."""
    ERROR = "error"
    """Another exit code: an uncaught exception, or `sys.exit`."""
    TIMEOUT = "timeout"
    """Killed at its limit of wall-clock or processor seconds."""
    MEMORY = "memory"
    """Ended with MemoryError, or was killed by the kernel for its memory."""
    OUTPUT_LIMIT = "output_limit"
    """Killed because it printed more than allowed; the result has the output up to the limit."""
    DISK_LIMIT = "disk_limit"
    """Killed, or failed, with its files at their limit."""
    CRASHED = "crashed"
    """Ended by a signal: a segmentation fault, an abort."""
    INFRA_ERROR = "infra_error"
    """The sandbox failed, so the result says nothing about the program or the model."""


class Tier(IntEnum):
    """Kinds of isolation; the README has the promises of each."""

    REMOTE = 0
    NAMESPACES = 1
    LANDLOCK = 2
    SEATBELT = 3
    UNSAFE_SUBPROCESS = 5


def format_tier(tier: Tier) -> str:
    """Return a tier as texts show it, such as ``tier 1 (namespaces)``."""
    return f"tier {int(tier)} ({tier.name.lower()})"


@frozen(kw_only=True)
class RunResult:
    """
    The result of a run of code.

    Attributes:
        status: how it ended.
        stdout: at most the output limit; bytes that are not UTF-8 are replaced.
        stderr: likewise; the limit is for both together. For `infra_error` the reason.
        exit_code: as a shell reports it: 128 plus the signal if one ended the program; None if it never ran.
        wall_s: seconds from start to end, without the wait in the queue.
        tier: kind of isolation.
        queued_s: seconds in the queue.
        cpu_s: processor seconds of all its threads.
        max_rss_kb: peak resident memory, KiB, including the warm interpreter's.
        session_lost: the call ended the interpreter of its session, and its variables are lost.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    wall_s: float = 0.0
    tier: Tier
    queued_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_kb: int = 0
    session_lost: bool = False

    @property
    def isolated(self) -> bool:
        """False for `unsafe_subprocess`, where the program could read and change all that its user can."""
        return self.tier is not Tier.UNSAFE_SUBPROCESS

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; `tier` is the number, `tier_name` the word."""
        return {
            **asdict(self),
            "status": self.status.value,
            "tier": int(self.tier),
            "tier_name": self.tier.name.lower(),
            "isolated": self.isolated,
        }


class SandboxUnavailableError(InfrastructureError):
    """No isolation that the config allows works here; the text has the reason for each tier and the hints."""
