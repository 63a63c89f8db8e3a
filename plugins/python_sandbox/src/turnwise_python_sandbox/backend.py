"""Backends, which run jobs, and the choice of one for a config."""

from __future__ import annotations

import sys
import threading
from typing import Final, Protocol

from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.result import SandboxUnavailableError, Tier, format_tier
from turnwise_python_sandbox.selftest import TierSelection, select_tier
from turnwise_python_sandbox.subprocess_backend import SubprocessBackend
from turnwise_python_sandbox.supervisor import Supervisor


class Backend(Protocol):
    """Runs jobs. It resolves the future of every job in the end, also after `close`."""

    @property
    def tier(self) -> Tier:
        """The isolation of all runs."""

    def submit(self, job: Job) -> None:
        """Start a job or queue it."""

    def kill(self, job: Job) -> None:
        """End a running or waiting job."""

    def close(self) -> None:
        """End all jobs. Idempotent."""

    def detach_after_fork(self) -> None:
        """Close, in a forked child, the descriptors of the parent process."""


_selections: Final[dict[SandboxConfig, TierSelection]] = {}
_selections_lock: Final = threading.Lock()


def start_backend(config: SandboxConfig) -> Backend:
    """
    Start the best backend that the config allows and whose self-test passes on this machine.

    Raises:
        SandboxUnavailableError: there is none; the text has the reasons and the hints.
    """
    if config.remote_url:
        # Few runs need it, and an HTTP client is slow to import.
        from turnwise_python_sandbox.remote_backend import RemoteBackend

        return RemoteBackend(config)
    try:
        return _start_isolated_backend(config)
    except SandboxUnavailableError as error:
        if not config.unsafe_subprocess:
            raise SandboxUnavailableError(
                f"no isolation works here, so no code is run. {error}. `turnwise doctor python_sandbox` has details; "
                "set remote_url to use a service, or unsafe_subprocess: true to run without isolation"
            ) from error
    return SubprocessBackend(config, Tier.UNSAFE_SUBPROCESS)


def _start_isolated_backend(config: SandboxConfig) -> Backend:
    if config.tier is Tier.UNSAFE_SUBPROCESS:
        raise SandboxUnavailableError("tier 5 does not isolate, so it needs unsafe_subprocess: true")
    if sys.platform == "darwin" and config.tier in (None, Tier.SEATBELT):
        return SubprocessBackend(config, Tier.SEATBELT)
    if config.tier in (Tier.SEATBELT, Tier.REMOTE):
        raise SandboxUnavailableError(f"{format_tier(config.tier)} does not exist on this machine")
    spec = _select_tier_once(config).spec
    return Supervisor(spec, config.num_servers, config.capacity, config.max_sessions)


def _select_tier_once(config: SandboxConfig) -> TierSelection:
    """Return the tier for a config; the self-test runs once per process."""
    with _selections_lock:
        if config not in _selections:
            _selections[config] = select_tier(config)
        return _selections[config]
