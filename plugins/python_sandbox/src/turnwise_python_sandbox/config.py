"""Options of the sandbox and of the tool `python`."""

from __future__ import annotations

import os
from typing import Final, Literal

from attrs import field, frozen, validators

from turnwise_python_sandbox.result import Tier

_MIB: Final = 2**20


def count_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _to_tier(value: int | None) -> Tier | None:
    if value is None:
        return None
    if value not in list(Tier):
        raise ValueError(f"'tier' must be one of {', '.join(str(int(tier)) for tier in Tier)}: {value}")
    return Tier(value)


@frozen(kw_only=True)
class SandboxConfig:
    """
    Limits of each run, and the processes that serve the runs. A call may override the first three limits.

    Attributes:
        timeout_s: wall-clock seconds.
        memory_mb: MiB of address space in addition to the warm interpreter's.
        max_output_bytes: of standard output and standard error together; a program that prints more is killed.
        cpu_s: processor seconds of all threads together; None for twice `timeout_s`.
        disk_mb: MiB of all files together.
        max_files: number of files and directories.
        max_threads: of all programs of one fork server together.
        tier: require this tier; None selects the best one that passes its self-test.
        unsafe_subprocess: run without isolation if no tier works.
        preload: modules that each fork server imports once, so that programs import them at no cost.
        servers: most fork servers, started on demand; None for one per core.
        max_in_flight: most programs at a time; further ones wait. None for two per core.
        max_sessions: most sessions at a time.
        session_idle_s: seconds after which an unused session ends.
        cgroup: directory of a cgroup (v2) that gives its children the memory controller, and in which this user may
            create cgroups: fork servers and programs run in a new one. Empty for none. Tiers 1 and 2 only.
        cgroup_memory_mb: MiB that all programs of this process may hold together in that cgroup, memory of the kernel
            included.
        python: interpreter whose standard library and packages the programs use; empty for this one.
        readable: additional files or directories that programs may read.
        max_landlock_abi: use no later Landlock ABI than this, as an older kernel would; None for the kernel's own.
        remote_url: address of a SandboxFusion service, such as ``http://localhost:8080``, that runs all programs.
        remote_token_env: environment variable that holds a bearer token for the service.
    """

    timeout_s: float = field(default=10.0, validator=validators.gt(0))
    memory_mb: int = field(default=512, validator=validators.ge(16))
    max_output_bytes: int = field(default=_MIB, validator=validators.ge(0))
    cpu_s: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    disk_mb: int = field(default=64, validator=validators.ge(1))
    max_files: int = field(default=1024, validator=validators.ge(1))
    max_threads: int = field(default=1024, validator=validators.ge(16))
    tier: Tier | None = field(default=None, converter=_to_tier)
    unsafe_subprocess: bool = False
    preload: tuple[str, ...] = field(default=(), converter=tuple)
    servers: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_in_flight: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_sessions: int = field(default=256, validator=validators.ge(1))
    session_idle_s: float = field(default=600.0, validator=validators.gt(0))
    cgroup: str = ""
    cgroup_memory_mb: int = field(default=8192, validator=validators.ge(64))
    python: str = ""
    readable: tuple[str, ...] = field(default=(), converter=tuple)
    max_landlock_abi: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    remote_url: str = ""
    remote_token_env: str = ""

    @property
    def num_servers(self) -> int:
        """Most fork servers, with the default filled in."""
        return self.servers or count_cores()

    @property
    def capacity(self) -> int:
        """Most programs at a time, with the default filled in."""
        return self.max_in_flight or 2 * count_cores()


@frozen(kw_only=True)
class PythonToolConfig:
    """
    Options of the tool `python`.

    Attributes:
        sandbox: limits and isolation of the code.
        persistent: one interpreter per episode, which keeps its variables between calls; otherwise one per call.
        empty_output: the observation if a program printed nothing.
        errors: place of standard error in the observation: after the output, its last line only, or not at all.
        max_chars: longest observation, characters.
        truncate: which part of a longer observation to keep: the head, the tail, or both ends.
        description: description of the tool in its schema.
    """

    sandbox: SandboxConfig = field(factory=SandboxConfig)
    persistent: bool = False
    empty_output: str = "(no output)"
    errors: Literal["after", "last_line", "hidden"] = "after"
    max_chars: int = field(default=8192, validator=validators.ge(64))
    truncate: Literal["head", "tail", "middle"] = "middle"
    description: str = "Run Python code and read what it prints. Only printed values are seen."
