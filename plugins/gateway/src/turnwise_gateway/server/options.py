"""Options of the server, and the check of `Host` that they lead to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from attrs import field, frozen, validators

from turnwise.errors import ConfigError
from turnwise_gateway.calls import CallRefusedError

_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")


@frozen(kw_only=True)
class ServerOptions:
    """
    Options of the server.

    Attributes:
        host: address to listen at; one of this machine alone unless `allow_remote`.
        port: 0 takes a free one.
        allow_remote: listen at addresses that other machines reach.
        hosts: names by which agents reach the server besides `host`, IP addresses and `localhost`.
        max_body_bytes: largest body of a request.
        receive_s: seconds for a client to send a whole request.
        send_s: seconds for a client to take a whole reply, once there is one.
        heartbeat_s: seconds between two heartbeats of a stream that waits for its reply.
        delta_s: least seconds between two parts of a reply that is being sampled.
        keepalive_s: seconds that an idle connection stays open.
        max_waiting: most connections at a port on which no request is being answered; None takes an eighth of the
            descriptors of the process, and at most 1,024.
        max_in_flight: most calls at once; more of them are told to come back later.
        retry_after_s: seconds after which they should.
    """

    host: str = "127.0.0.1"
    port: int = field(default=0, validator=[validators.ge(0), validators.le(65535)])
    allow_remote: bool = False
    hosts: tuple[str, ...] = ()
    max_body_bytes: int = field(default=32 * 1024 * 1024, validator=validators.ge(1))
    receive_s: float = field(default=30.0, validator=validators.gt(0))
    send_s: float = field(default=60.0, validator=validators.gt(0))
    heartbeat_s: float = field(default=5.0, validator=validators.gt(0))
    delta_s: float = field(default=0.05, validator=validators.ge(0))
    keepalive_s: float = field(default=75.0, validator=validators.gt(0))
    max_waiting: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_in_flight: int = field(default=4096, validator=validators.ge(1))
    retry_after_s: int = field(default=5, validator=[validators.ge(1), validators.le(120)])

    def __attrs_post_init__(self) -> None:
        if not self.allow_remote and not _is_loopback(self.host):
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines: set allow_remote, or use '127.0.0.1'"
            )

    def check_host(self, values: Sequence[str]) -> None:
        """
        Refuse a request whose `Host` headers name no address of this server.

        A web page in a browser can reach a local server under a name that its author controls. An IP address is no
        such name, so remote servers accept every address.
        """
        if len(values) == 1:
            host = _host_of(values[0])
            if _is_loopback(host) or host in {self.host, *self.hosts}:
                return
            if self.allow_remote and _address(host) is not None:
                return
        raise CallRefusedError("unknown_host", "the header 'Host' does not name this server")


def _host_of(value: str) -> str:
    """Return the name or address in a header; an empty text if it has another form."""
    found = _HOST.fullmatch(value)
    return "" if found is None else (found[1] or found[2]).lower()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@lru_cache(maxsize=256)  # asked for the same few names at every request
def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback
