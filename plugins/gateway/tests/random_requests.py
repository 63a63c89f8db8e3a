"""Random requests to a port, none of which may be an error of the server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from random_bodies import requests
from structlog.testing import capture_logs

from turnwise_testing.probes.agent import AgentProbe, probe_resources

NUM_BODIES = 20
"""Bodies of one example."""
Request = tuple[str, bytes]


@frozen
class Port:
    """A port, and the ids that stand in its paths."""

    url: str
    key: str
    names: dict[str, str]


class Errors(logging.Handler):
    """Keeps what the libraries log as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


async def send(port: Port, sent: Sequence[Request]) -> list[tuple[int, Request, str]]:
    """Send requests one after the other, and return those that were answered with 5xx."""
    found = []
    headers = {"Authorization": f"Bearer {port.key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for path, body in sent:
            async with client.post(port.url + path.format(**port.names), data=body) as response:
                text = await response.text()
                if response.status >= 500:
                    found.append((response.status, (path, body), text))
    return found


def check_bodies(run: Callable[[Sequence[Request], Path], Any], routes: dict[str, Any], folder: Path) -> None:
    """Check that random bodies get no 5xx at a port, and log no error."""

    @given(sent=st.lists(requests(routes), min_size=NUM_BODIES, max_size=NUM_BODIES))
    def check(sent: list[Request]) -> None:
        errors = Errors()
        logging.getLogger().addHandler(errors)
        try:
            with capture_logs() as logs:
                found = run(sent, folder)
        finally:
            logging.getLogger().removeHandler(errors)

        assert found == []
        assert [line for line in logs if line["log_level"] in ("error", "critical")] == []
        assert errors.records == []

    check()


def build_probe(agent: Any) -> AgentProbe:
    resources = probe_resources()
    return AgentProbe(make_agent=lambda: agent, resources=resources, turns=("Done.",), response_length=4096)
