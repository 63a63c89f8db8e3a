"""A worker of a run: its episodes wait for agents. Prints a JSON line for each result."""

import asyncio
import json
import sys

from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources


async def main(file, first, count, options):
    config = PoolConfig(control_file=file, **options)
    resources = probe_resources()
    agent = make_agent(config, resources)
    probe = AgentProbe(
        make_agent=lambda: agent,
        resources=resources,
        turns=("The answer is 42.", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'),
        response_length=1 << 14,
        timeout_s=120.0,
    )
    engine = probe.engine()
    await engine.start()

    async def run(number):
        done = await probe.run(make_task(number), agent=agent, engine=engine)
        turns = [
            turn
            for record, origin in zip(done.result.trajectories, done.result.lineage, strict=True)
            if origin.trained
            for turn in record.turns()
        ]
        score = done.episode.memory.get("reported_score")
        line = {"uid": done.result.uid, "status": done.result.status, "score": score, "turns": len(turns)}
        print(json.dumps(line), flush=True)

    async with asyncio.TaskGroup() as group:
        for number in range(first, first + count):
            group.create_task(run(number))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])))
