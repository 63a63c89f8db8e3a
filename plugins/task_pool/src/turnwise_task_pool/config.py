"""Options of the agent `task_pool`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attrs import field, frozen, validators

from turnwise.errors import ConfigError
from turnwise_gateway.config import AgentLimits

LOOPBACK: Final = "127.0.0.1"


@frozen(kw_only=True)
class PoolConfig(AgentLimits):
    """
    The control port at which outside agents lease episodes, and the rules of their sessions.

    Attributes:
        control_file: JSON file with the `url` and the `secret` of the port while the run lasts; only its owner can
            read it.
        pool_file: SQLite file of the episodes, their leases and results, which stays after the run. A resumed run
            continues with it. None keeps them in memory.
        control_port: 0 takes a free one.
        secret_variable: environment variable with the secret; without one each port gets a random secret.
        lease_s: seconds after which a lease without calls and heartbeats expires.
        max_attempts: leases of an episode before it fails.
        score_s: seconds without a call after which a leased episode is timed out.
        allow_remote: lets agents on other machines connect: the control port and the workers' ports listen at the
            addresses of their machines in the run. Workers on several machines need it.
        control_host: address of the driver's machine for agents; None takes the one that the run knows, which the
            runtime local does not.
        capacity: most episodes that wait or are leased.
        keep_requests: folder for a file with the requests of each session, for `turnwise gateway replay`; None keeps
            none.
    """

    control_file: Path = field(converter=Path)
    pool_file: Path | None = None
    control_port: int = field(default=0, validator=[validators.ge(0), validators.le(65535)])
    secret_variable: str = "TURNWISE_CONTROL_SECRET"
    lease_s: float = field(default=300.0, validator=validators.gt(0.0))
    max_attempts: int = field(default=3, validator=validators.ge(1))
    score_s: float = field(default=600.0, validator=validators.gt(0.0))
    allow_remote: bool = False
    control_host: str | None = None
    capacity: int = field(default=100_000, validator=validators.ge(1))
    keep_requests: Path | None = None

    def listen_at(self, host: str) -> str:
        """
        Return the address for agents elsewhere of the driver's machine, which the run knows as `host`.

        Raises:
            ConfigError: the run knows no address that other machines reach.
        """
        if self.control_host is None and host == LOOPBACK:
            raise ConfigError(
                "agent.control_host: agents on other machines cannot reach 127.0.0.1, the only address that the run "
                "knows: set it to the address of this machine, or set allow_remote to false"
            )
        return self.control_host or host
