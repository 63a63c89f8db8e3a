"""What a run of code comes back as."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

from attrs import asdict, frozen

from turnwise.errors import InfrastructureError


class Status(StrEnum):
    """How a run ended; the verdict is the supervisor's, from the wait status, never from what the program printed."""

    OK = "ok"
    """Exit code 0."""
    ERROR = "error"
    """Another exit code: an uncaught exception, or `sys.exit`."""
    TIMEOUT = "timeout"
    """Killed at its limit of wall or processor seconds."""
    MEMORY = "memory"
    """It ended with MemoryError, or the kernel killed it for its memory."""
    OUTPUT_LIMIT = "output_limit"
    """Killed because it printed too much; what fits is there."""
    DISK_LIMIT = "disk_limit"
    """Killed, or failed, with its files at their limit."""
    CRASHED = "crashed"
    """A signal ended it: a segmentation fault, an abort."""
    INFRA_ERROR = "infra_error"
    """The sandbox failed, not the program; it says nothing about the model."""


class Tier(IntEnum):
    """What stands between a program and the host; see the README for what each promises."""

    REMOTE = 0
    NAMESPACES = 1
    LANDLOCK = 2
    SEATBELT = 3
    UNSAFE_SUBPROCESS = 5


@frozen(kw_only=True)
class RunResult:
    """
    What a run of code gave.

    Attributes:
        status: how it ended.
        stdout: at most the output limit; bytes that are no UTF-8 are replaced.
        stderr: likewise; the limit is for both together. For `infra_error` it says what failed.
        exit_code: as the shell counts: 128 plus the signal when one ended it; None when it never ran.
        wall_s: seconds from its start to its end; waiting for a free place is not in it.
        tier: what isolated it.
        queued_s: seconds that it waited for a free place.
        cpu_s: processor seconds of all its threads.
        max_rss_kb: peak resident memory, KiB, the warm interpreter's own included.
        session_lost: it was a call of a session, and the session is over.
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
        """False for `unsafe_subprocess`: the program could read and change whatever its user can."""
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
    """No isolation that was asked for works here; the text says why for each, and what would help."""
