"""Coding agents from npm in runs of thirty turns: sub-agents, summaries, streams that break, and interrupted runs."""

import asyncio
import os
import signal
import subprocess
from collections import Counter

import pytest
from coding_sessions import PatientSessions, Wire, check_records, kinds
from long_coding import AGENTS, ANSWER, GO_ON, NUM_STEPS, TASK, LongModel

from turnwise import Status
from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory

pytestmark = pytest.mark.slow

CUTS = (4, 21)
"""Steps whose stream breaks, before and after the summary."""
STOPPED = 12
"""The step in which the agent is interrupted."""


@pytest.fixture
def run(path_of, tmp_path):
    """Runs the commands of an agent in one session, after each other; returns the episode and the last output."""

    def start(cli, work, holds):
        agent, models, output = AGENTS[cli], [], []
        home, repository = tmp_path / "home", tmp_path / "repository"
        home.mkdir()
        repository.mkdir()
        (repository / "notes.txt").write_text("one\ntwo\n", encoding="utf-8")

        def make_engine(probe):
            models.append(LongModel(probe.chat, agent, holds))
            return models[0].engine()

        async def scenario(session):
            directory = SessionDirectory("tiny")
            key = directory.add("s-1", session)
            async with GatewayServer(directory, ServerOptions(heartbeat_s=0.05)) as server, Wire(server.port) as wire:
                variables = agent.configure(home, f"http://127.0.0.1:{wire.port}/s/s-1", key)
                path = f"{path_of(cli)}:{os.environ['PATH']}"
                environment = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", **variables}

                async def start(*command):
                    return await asyncio.create_subprocess_exec(
                        *command,
                        cwd=repository,
                        env=environment,
                        start_new_session=True,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                    )

                output.append(await work(agent, models[0], wire, start))

        done = PatientSessions().run(scenario, engine=make_engine, limits={"prompt_length": 1 << 20})
        return done, output[0]

    return start


async def cut_streams(agent, model, wire, start):
    """Run an agent whose streams break at each held step; return its output."""
    process = await start(*agent.start, TASK)
    async with asyncio.TaskGroup() as group:
        cutting = [group.create_task(wire.cut_after(event)) for event in model.held.values()]
        output = await process.communicate()
        for each in cutting:
            each.cancel()
    assert process.returncode == 0, output[0].decode()[-3000:]
    return output[0].decode()


async def stop_and_resume(agent, model, _wire, start):
    """Interrupt an agent in the held step, and continue its conversation; return the last output."""
    process = await start(*agent.start, TASK)
    (held,) = model.held.values()
    await held.wait()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
    await process.communicate()
    process = await start(*agent.resume, GO_ON)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-3000:]
    return output.decode()


def check_run(done, output, agent, forks=frozenset()):
    """
    One conversation, one sub-agent, one summary, and the conversation after it; no record for another reason.

    Returns:
        The number of turns of the conversation.
    """
    assert ANSWER in output
    assert Status.COMPLETED is done.result.status
    assert ANSWER == done.result.messages[-1]["content"]  # rewards read it
    check_records(done)
    lineage, num_records, num_turns = done.result.lineage, Counter(kinds(done)), Counter()
    for record, described in zip(done.records, lineage, strict=True):
        num_turns[described.kind] += len(record.turns())
        assert described.trained is (described.kind != "auxiliary")
        if described.label == "compaction":
            assert "compaction" == lineage[described.parent].kind
    expected = {"main", "subagent", "compaction", *agent.auxiliary, *({"sibling"} & {*num_records} if forks else ())}
    assert expected == set(num_records), lineage
    assert (1, 3) == (num_records["subagent"], num_turns["subagent"])
    assert (1, 1) == (num_records["compaction"], num_turns["compaction"])
    assert agent.forks | forks >= {name.removeprefix("forks_") for name in done.counts if name.startswith("forks_")}
    return num_turns["main"] + num_turns["sibling"]


@pytest.mark.parametrize("cli", AGENTS)
def test_thirty_turns(run, cli):
    """Two streams break on the way: each turn is in one record, once."""
    done, output = run(cli, cut_streams, CUTS)

    # Qwen Code tells the model of its sub-agent's end when the work is done, and gets the answer again.
    assert check_run(done, output, AGENTS[cli]) in (NUM_STEPS + 1, NUM_STEPS + 2)


@pytest.mark.parametrize("cli", AGENTS)
def test_an_interrupted_run_goes_on(run, cli):
    """The interrupted turn is in no record; what the agent tells the model of it is a branch or a new conversation."""
    done, output = run(cli, stop_and_resume, (STOPPED,))

    num_turns = check_run(done, output, AGENTS[cli], forks=frozenset({"inside", "foreign_turn"}))
    assert num_turns in (NUM_STEPS, NUM_STEPS + 1)
