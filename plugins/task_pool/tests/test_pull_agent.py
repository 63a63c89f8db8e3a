"""Outside agents lease episodes, run them over HTTP and score them."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pull_control import Control, error_of
from session_scenarios import TURNS

from turnwise import Status
from turnwise_gateway.host import ModelClient
from turnwise_task_pool.driver.offers import Offers
from turnwise_task_pool.pool.store import Lease


def test_an_outside_agent_runs_and_scores_an_episode(run_with: Callable[..., Any], tmp_path: Path) -> None:
    """The lease has everything that it needs; the score and the metrics arrive, and the turns are recorded."""

    async def outside(control: Control) -> None:
        leased = await control.lease()
        assert stat.S_IMODE((tmp_path / "control.json").stat().st_mode) == 0o600
        assert "Question 0?" == leased["task"]["messages"][0]["content"]
        assert "ground_truth" not in leased["task"]
        await control.work(leased)
        await control.end(leased, score=0.75, metrics={"tests": 3})

    (done,) = run_with(outside)

    assert Status.COMPLETED is done.result.status
    assert 0.75 == done.episode.memory["reported_score"]
    assert 3 == done.result.metrics.extra["agent/tests"]
    (record,) = done.result.trajectories
    assert 1 == len(record.turns())


def test_conversations_are_compared_with_the_template(run_with: Callable[..., Any]) -> None:
    """Both conversations of the attempt that is trained, and none of another one."""

    async def outside(control: Control) -> None:
        lost = await control.lease()
        await control.work(lost)
        await control.end(lost, "fail", reason="no idea")
        leased = await control.lease()
        await control.work(leased)
        await control.work(leased | {"task": {"messages": [{"role": "user", "content": "Another question?"}]}})
        await control.end(leased, score=0.5)

    (done,) = run_with(outside, turns=TURNS[1:4])

    metrics = done.result.metrics.extra
    assert [False, True, True] == [each.trained for each in done.result.lineage]
    assert (2, 0) == tuple(metrics[f"template/{name}_conversations"] for name in ("compared", "differing"))


def test_many_episodes_and_few_agents(run_with: Callable[..., Any]) -> None:
    """Every episode gets its own score."""
    num_episodes = 12

    async def outside(control: Control) -> None:
        async def agent() -> None:
            for _ in range(num_episodes // 3):
                leased = await control.lease()
                await control.work(leased)
                await control.end(leased, score=int(leased["task"]["uid"].partition("-")[2]))

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(agent())

    done = run_with(outside, num_episodes=num_episodes)

    assert list(range(num_episodes)) == [each.episode.memory["reported_score"] for each in done]
    assert {Status.COMPLETED} == {each.result.status for each in done}


def test_an_attempt_that_failed_is_not_trained(run_with: Callable[..., Any]) -> None:
    """The next attempt has a separate session; the records of the first stay, untrained, and its key is closed."""

    async def outside(control: Control) -> None:
        first = await control.lease()
        await control.work(first)
        await control.end(first, "fail", reason="no idea")
        second = await control.lease()
        assert (2, first["session"]["api_key"]) != (second["lease"]["attempt"], second["session"]["api_key"])
        with pytest.raises(Exception, match="over"):
            await control.work(first)
        await control.post(f"/sessions/{first['lease']['id']}/score", 409, id="late", score=1)
        await control.work(second)
        await control.post(f"/sessions/{second['lease']['id']}/score", id="a", score=0.5, turn=0)
        await control.end(second)

    (done,) = run_with(outside)

    assert Status.COMPLETED is done.result.status
    assert {"turns": [0.0, 0.5]} == done.episode.memory["reported_score"]
    assert [False, True] == [each.trained for each in done.result.lineage]
    assert 1 == done.result.metrics.extra["gateway/lost_attempts"]


def test_an_episode_without_attempts_left_fails(run_with: Callable[..., Any]) -> None:
    """The owner is that of the last failure."""

    async def outside(control: Control) -> None:
        for reason in ("no idea", "still none"):
            leased = await control.lease()
            await control.work(leased)
            await control.end(leased, "fail", reason=reason)

    (done,) = run_with(outside, max_attempts=2)

    assert (Status.FAILED, "agent") == (done.result.status, done.result.fault.owner)
    assert "still none" in done.result.fault.message


def test_a_lost_agent_is_the_machines_failure(run_with: Callable[..., Any]) -> None:
    """A lease that nobody renews expires; a late score changes nothing."""

    async def outside(control: Control) -> None:
        leased = await control.lease()
        await control.work(leased)
        while not (await control.get("/tasks"))["stats"]["dead"]:  # noqa: ASYNC110 - the pool tells nobody
            await asyncio.sleep(0.02)

    (done,) = run_with(outside, lease_s=2.0, max_attempts=1)

    assert (Status.FAILED, "infra") == (done.result.status, done.result.fault.owner)
    assert "'w' expired" in done.result.fault.message


@pytest.mark.slow
@pytest.mark.parametrize("max_attempts", [1, 2])
def test_a_lease_that_expires_before_it_has_a_session(
    run_with: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, max_attempts: int
) -> None:
    """Its agent does not get it, but the lease of the next attempt, or none after the last one."""
    expired = asyncio.Event()
    lose, open_session = Offers.lose, Offers.open

    def note_lost(offers: Offers, lease: Lease) -> None:
        lose(offers, lease)
        expired.set()

    async def open_late(offers: Offers, lease: Lease) -> ModelClient | None:
        await expired.wait()
        return await open_session(offers, lease)

    monkeypatch.setattr(Offers, "lose", note_lost)
    monkeypatch.setattr(Offers, "open", open_late)

    async def outside(control: Control) -> None:
        while not control.file.exists():  # noqa: ASYNC110 - the agent and the run know each other by the file alone
            await asyncio.sleep(0.01)
        leased = await control.post("/tasks/lease", 200 if max_attempts == 2 else 204, worker="w", wait_s=4)
        if max_attempts == 2:
            assert leased["lease"]["attempt"] == 2
            await control.work(leased)
            await control.end(leased, score=1.0)

    (done,) = run_with(outside, lease_s=2.0, max_attempts=max_attempts)

    if max_attempts == 1:
        assert (Status.FAILED, "infra") == (done.result.status, done.result.fault.owner)
        assert "'w' expired" in done.result.fault.message
    else:
        assert Status.COMPLETED is done.result.status
        assert [True] == [each.trained for each in done.result.lineage]


@pytest.mark.slow
def test_an_agent_that_never_scores_is_timed_out(run_with: Callable[..., Any]) -> None:
    """`score_s` after its last call, however long its lease is, and not scored."""

    async def outside(control: Control) -> None:
        await control.work(await control.lease())

    (done,) = run_with(outside, score_s=2.0)

    assert Status.TIMED_OUT is done.result.status
    assert "reported_score" not in done.episode.memory


def test_a_score_without_a_call_is_a_failure(run_with: Callable[..., Any]) -> None:
    """An agent that never asked the model has nothing to train."""

    async def outside(control: Control) -> None:
        await control.end(await control.lease(), score=1.0)

    (done,) = run_with(outside)

    assert (Status.FAILED, "agent") == (done.result.status, done.result.fault.owner)
    assert "without a call" in done.result.fault.message


def test_a_score_ends_calls_in_flight(run_with: Callable[..., Any]) -> None:
    """A call that the engine would never answer ends with the lease, and its agent is told so."""

    sampling, num_requests = asyncio.Event(), iter(range(2))

    def hold(_request: object) -> float:
        if next(num_requests) == 0:
            return 0.0
        sampling.set()
        return 3600.0

    async def outside(control: Control) -> None:
        leased = await control.lease()
        await control.work(leased)
        async with asyncio.TaskGroup() as group:
            calling = group.create_task(error_of(control.work(leased)))
            await sampling.wait()
            await control.post(f"/sessions/{leased['lease']['id']}/score", id="a", score=0.25)
            assert "over" in await calling

    (done,) = run_with(outside, latency_s=hold)

    assert Status.COMPLETED is done.result.status
    assert 0.25 == done.episode.memory["reported_score"]
    assert [1, 0] == [len(record.turns()) for record in done.result.trajectories]


def test_a_session_can_be_read_while_it_runs(run_with: Callable[..., Any]) -> None:
    """Its transcript has the tokens of the record, and the reasoning apart from the text."""
    exported: list[dict[str, Any]] = []

    async def outside(control: Control) -> None:
        leased = await control.lease()
        await control.work(leased)
        exported.append(await control.get(f"/sessions/{leased['lease']['id']}?format=atif"))
        await control.end(leased, score=1.0)

    (done,) = run_with(outside, turns=("<think>Hm.</think>It is 42.",))

    (step,) = [step for step in exported[0]["steps"] if step["source"] == "agent"]
    assert ("Hm.", "It is 42.") == (step["reasoning_content"].strip(), step["message"].strip())
    (record,) = done.result.trajectories
    assert step["metrics"]["completion_token_ids"] == record.response_ids[record.response_mask == 1].tolist()


def test_an_episode_that_no_agent_leases_is_timed_out(run_with: Callable[..., Any]) -> None:
    """Its own deadline ends it, and no agent gets it afterwards."""

    async def outside(control: Control) -> None:
        """Lease nothing."""

    (done,) = run_with(outside, limits={"episode_s": 0.3})

    assert Status.TIMED_OUT is done.result.status
