"""Options of the sandbox and of the tool `python`."""

from __future__ import annotations

import os
from typing import Literal

from attrs import field, frozen, validators

from turnwise_python_sandbox.result import Tier

_MIB = 2**20


def num_cores() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tier(value: int | None) -> Tier | None:
    return None if value is None else Tier(value)


@frozen(kw_only=True)
class SandboxConfig:
    """
    How code is run. The limits are per run; a call may lower or raise the first three for itself.

    Attributes:
        timeout_s: wall-clock seconds.
        memory_mb: MiB of address space beyond what the warm interpreter takes.
        max_output_bytes: of standard output and errors together; what is beyond is cut and the program killed.
        cpu_s: processor seconds of all threads together; None for twice `timeout_s`.
        disk_mb: MiB of all files together.
        max_files: files and directories.
        max_threads: of all programs of one server together.
        tier: use this one or fail; None takes the best that passes its self-test.
        unsafe_subprocess: allow runs with no isolation at all where nothing better works.
        preload: modules that are imported once per server; a program that imports them pays nothing.
        servers: fork servers, started as they are needed; None for one per core.
        max_in_flight: programs that run at the same time; others wait. None for two per core.
        max_sessions: interpreters that live on between calls; None for 256.
        session_idle_s: seconds after which an unused session ends.
        python: interpreter whose library and packages programs see; empty for this one.
        readable: more files or directories that programs may read.
        remote_url: of a SandboxFusion service, such as ``http://localhost:8080``; nothing runs on this machine then.
        remote_token_env: environment variable with a bearer token for the service.
    """

    timeout_s: float = field(default=10.0, validator=validators.gt(0))
    memory_mb: int = field(default=512, validator=validators.ge(16))
    max_output_bytes: int = field(default=_MIB, validator=validators.ge(0))
    cpu_s: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    disk_mb: int = field(default=64, validator=validators.ge(1))
    max_files: int = field(default=1024, validator=validators.ge(1))
    max_threads: int = field(default=1024, validator=validators.ge(16))
    tier: Tier | None = field(default=None, converter=_tier)
    unsafe_subprocess: bool = False
    preload: tuple[str, ...] = field(default=(), converter=tuple)
    servers: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_in_flight: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_sessions: int = field(default=256, validator=validators.ge(1))
    session_idle_s: float = field(default=600.0, validator=validators.gt(0))
    python: str = ""
    readable: tuple[str, ...] = field(default=(), converter=tuple)
    remote_url: str = ""
    remote_token_env: str = ""

    @property
    def num_servers(self) -> int:
        """Most fork servers."""
        return self.servers or num_cores()

    @property
    def capacity(self) -> int:
        """Most programs at a time."""
        return self.max_in_flight or 2 * num_cores()


@frozen(kw_only=True)
class PythonToolConfig:
    """
    Options of the tool `python`.

    Attributes:
        sandbox: how the code is run.
        persistent: one interpreter per episode, whose names live on from call to call; a fresh one per call otherwise.
        empty_output: what the model reads when a program printed nothing.
        errors: where the model reads standard errors: after the output, their last line only, or not at all.
        max_chars: longest text that the model reads, in characters.
        truncate: which part of a longer text stays: the head, the tail, or both ends.
        description: of the tool, in its schema.
    """

    sandbox: SandboxConfig = field(factory=SandboxConfig)
    persistent: bool = False
    empty_output: str = "(no output)"
    errors: Literal["after", "last_line", "hidden"] = "after"
    max_chars: int = field(default=8192, validator=validators.ge(64))
    truncate: Literal["head", "tail", "middle"] = "middle"
    description: str = "Run Python code and read what it prints. Only printed values are seen."
