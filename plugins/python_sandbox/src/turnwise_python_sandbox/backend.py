"""What can run a job, and which of them a config gets."""

from __future__ import annotations

import sys
import threading
from typing import Final, Protocol

from attrs import frozen

from turnwise_python_sandbox.cold import ColdRuns
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.result import SandboxUnavailableError, Tier
from turnwise_python_sandbox.selftest import Choice, choose
from turnwise_python_sandbox.supervisor import Supervisor


class Backend(Protocol):
    """Runs jobs; every job's `answer` is set in the end, also after `close`."""

    def number(self) -> int:
        """Return a new job's number."""

    def submit(self, job: Job) -> None:
        """Take a job."""

    def kill(self, job: Job) -> None:
        """End a job early, whether it runs or waits."""

    def close(self) -> None:
        """End all. Idempotent."""

    def forget(self) -> None:
        """In a forked child: let go of what is the parent's."""


@frozen(kw_only=True)
class Started:
    """A backend, and the tier that its runs have."""

    backend: Backend
    tier: Tier


_choices: Final[dict[SandboxConfig, Choice]] = {}
_lock: Final = threading.Lock()


def start(config: SandboxConfig) -> Started:
    """
    Start the best backend that the config allows and this machine passes the self-test for.

    Raises:
        SandboxUnavailableError: there is none; the text says why, and what would help.
    """
    if config.remote_url:
        # Few runs need it, and an HTTP client is slow to import.
        from turnwise_python_sandbox.remote import RemoteRuns

        return Started(backend=RemoteRuns(config), tier=Tier.REMOTE)
    try:
        return _start_isolated(config)
    except SandboxUnavailableError as error:
        if not config.unsafe_subprocess:
            raise SandboxUnavailableError(
                f"no isolation works here, so no code is run. {error}. `turnwise sandbox doctor` says more; "
                "set remote_url to use a service, or unsafe_subprocess: true to run with none at all"
            ) from error
    return Started(backend=ColdRuns(config, Tier.UNSAFE_SUBPROCESS), tier=Tier.UNSAFE_SUBPROCESS)


def _start_isolated(config: SandboxConfig) -> Started:
    if config.tier is Tier.UNSAFE_SUBPROCESS:
        raise SandboxUnavailableError("tier 5 is no isolation and needs unsafe_subprocess: true")
    if sys.platform == "darwin" and config.tier in (None, Tier.SEATBELT):
        return Started(backend=ColdRuns(config, Tier.SEATBELT), tier=Tier.SEATBELT)
    if config.tier in (Tier.SEATBELT, Tier.REMOTE):
        raise SandboxUnavailableError(f"tier {int(config.tier)} ({config.tier.name.lower()}) does not exist here")
    recipe = choice(config).recipe
    supervisor = Supervisor(recipe, config.num_servers, config.capacity, config.max_sessions)
    return Started(backend=supervisor, tier=recipe.tier)


def choice(config: SandboxConfig) -> Choice:
    """Return the tier for a config; its self-test holds for the life of this process."""
    with _lock:
        if config not in _choices:
            _choices[config] = choose(config)
        return _choices[config]
