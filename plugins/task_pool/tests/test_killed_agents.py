"""Agents in separate processes, killed at random moments: each episode is run and scored once, by its own agent."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from pull_control import serviced

from turnwise import Status
from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_chat, probe_resources

NUM_EPISODES = 60
NUM_AGENTS = 4
NUM_KILLS = 15
PROGRAM = Path(__file__).parent / "programs" / "pull_loop.py"


@define
class Agents:
    """Processes of agents that lease at a control port; each writes a log."""

    folder: Path
    running: list[subprocess.Popen[bytes]] = field(factory=list)
    num_started: int = 0

    def start(self) -> None:
        command = [sys.executable, PROGRAM, self.folder / "control.json", self.folder / f"{self.num_started}.log"]
        self.running.append(subprocess.Popen(command))
        self.num_started += 1

    def kill(self, index: int) -> None:
        """Kill an agent at once, whatever it does."""
        agent = self.running.pop(index)
        agent.kill()
        agent.wait()

    def news(self) -> list[dict[str, Any]]:
        """All that agents noted, half lines of killed ones left out."""
        lines = [line for log in self.folder.glob("*.log") for line in log.read_text().split("\n")[:-1]]
        return [json.loads(line) for line in lines]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Agents, which end with the test."""
    made = Agents(tmp_path)
    for _ in range(NUM_AGENTS):
        made.start()
    yield made
    while made.running:
        made.kill(0)


@pytest.mark.slow
def test_killed_agents_lose_and_mix_nothing(agents: Agents, tmp_path: Path) -> None:
    """SIGKILL of agents between and during their calls: each episode has its own question, turns and score."""
    choices = random.Random(0)
    resources = probe_resources()
    config = PoolConfig(control_file=str(tmp_path / "control.json"), lease_s=1.0, max_attempts=100)
    turns = ("The answer is 42.", *['<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'] * 2)
    probe = AgentProbe(
        make_agent=lambda: make_agent(config, resources), turns=turns, response_length=1 << 14, timeout_s=240.0
    )

    async def kill_agents() -> None:
        """Kill an agent whenever two more leases were handed out."""
        for number in range(NUM_KILLS):
            while sum("fence" in line for line in agents.news()) < 2 * number + NUM_AGENTS:  # noqa: ASYNC110 - processes
                await asyncio.sleep(0.01)
            await asyncio.sleep(choices.random() * 0.05)
            agents.kill(choices.randrange(NUM_AGENTS))
            agents.start()

    async def main() -> list[Any]:
        agent, engine = probe.make_agent(), probe.engine(token_latency_s=0.0005)
        await engine.start()
        async with serviced(agent), asyncio.TaskGroup() as group:
            killing = group.create_task(kill_agents())
            episodes = [
                group.create_task(probe.run(make_task(number), agent=agent, engine=engine))
                for number in range(NUM_EPISODES)
            ]
            await asyncio.wait(episodes)
            killing.cancel()
        assert agents.num_started > NUM_AGENTS + NUM_KILLS // 2
        return [episode.result() for episode in episodes]

    done = asyncio.run(main())

    assert {Status.COMPLETED} == {each.result.status for each in done}
    assert [float(number) for number in range(NUM_EPISODES)] == [each.episode.memory["reported_score"] for each in done]
    for number, each in enumerate(done):
        for record in each.result.trajectories:
            text = probe_chat().tokenizer.decode(record.input_ids[: record.num_prompt_tokens])
            assert f"Question {number}?" in text
        assert [True] == [origin.trained for origin in each.result.lineage if origin.trained]
    accepted = [line["uid"] for line in agents.news() if line.get("status") == 200]
    assert len(accepted) == len(set(accepted))
    assert any("gateway/lost_attempts" in each.result.metrics.extra for each in done)
