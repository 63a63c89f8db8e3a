"""Runs of episodes beside an outside agent."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "gateway/tests")]

import aiohttp
import pytest
from attrs import evolve
from pull_control import ANSWER, Control, serviced

from turnwise_gateway.tree.messages import split_think
from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources

Outside = Callable[[Control], Awaitable[None]]


@pytest.fixture
def run_with(tmp_path: Path) -> Callable[..., Any]:
    """A function that runs episodes beside an outside agent, and returns them."""

    def run(
        outside: Outside,
        *,
        num_episodes: int = 1,
        latency_s: Any = 0.0,
        limits: Any = None,
        turns: Any = ANSWER,
        reward: Any = None,
        **options: Any,
    ) -> list[Any]:
        file = tmp_path / "control.json"
        config = PoolConfig(control_file=str(file), **options)
        resources = evolve(probe_resources(), reasoning_parser=SimpleNamespace(split=split_think))
        probe = AgentProbe(
            make_agent=lambda: make_agent(config, resources), resources=resources, turns=turns, response_length=4096
        )

        async def main() -> list[Any]:
            agent = make_agent(config, resources)
            engine = probe.engine()
            engine.latency_s = latency_s
            await engine.start()
            async with serviced(agent), aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
                episodes = [
                    group.create_task(
                        probe.run(
                            make_task(number),
                            agent=agent,
                            engine=engine,
                            reward=reward,
                            limits=probe.limits(**(limits or {})),
                        )
                    )
                    for number in range(num_episodes)
                ]
                await outside(Control(http, file))
            assert not file.exists()
            return [episode.result() for episode in episodes]

        return asyncio.run(main())

    return run
