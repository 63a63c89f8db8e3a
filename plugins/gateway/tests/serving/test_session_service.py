"""The service of `turnwise gateway serve`: sessions whose opener has left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise_gateway.host import RunningServer
from turnwise_gateway.server import ServerOptions
from turnwise_gateway.serving.session_service import SessionService
from turnwise_testing.probes.agent import make_task


def test_a_session_ends_when_its_opener_has_left() -> None:
    """A client that leaves before it has the key leaves no session behind: it is failed as soon as it opens."""

    async def main() -> list[Any]:
        service = SessionService(RunningServer("m", ServerOptions()), capacity=1)
        service.submit = lambda _task, _number: None
        ends: list[Any] = []
        request = asyncio.ensure_future(service.request(make_task()))
        await asyncio.sleep(0)
        (opening,) = service._expected.values()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        opening.set_result(SimpleNamespace(fail=lambda *end: ends.append(end)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        return ends

    ((owner, reason),) = asyncio.run(main())

    assert owner == "infra"
    assert "left before it had the key" in reason
