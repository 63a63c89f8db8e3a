"""Groups that were interrupted are whole again when their files are read."""

from __future__ import annotations

import asyncio

import numpy as np
from attrs import evolve

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore, TurnScore
from turnwise.events.dispatch import Observers
from turnwise.options import GroupOptions
from turnwise.protocols import GroupCall
from turnwise.record.ended import EndedEpisode
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.runtime.groups import GroupScoring
from turnwise.types import EpisodeMetrics, Fault
from turnwise_result_files import load_unfinished, save_unfinished
from turnwise_rollout_buffer import GroupReward, GroupRewardConfig


class Best(GroupReward):
    """Gives 1 to each episode."""

    def __init__(self):
        super().__init__(GroupRewardConfig())

    def score_group(self, episodes):
        return [1.0] * len(episodes)


def make_task(uid):
    return Task(messages=({"role": "user", "content": "x"},), uid=uid)


def episode(uid, number, status=Status.COMPLETED):
    """Return an episode of two records that has ended, with scores of its turns."""
    records = []
    for size in (2, 3):
        record = Trajectory(np.array([1, 2]))
        record.add_action(np.arange(size), np.full(size, -0.1), 4)
        record.close()
        records.append(record)
    fault = Fault(owner="tool", kind="ToolError", message="down") if status is Status.FAILED else None
    scores = () if fault else (TrajectoryScore(value=0.0), TurnScore(values=(0.25,), extra={"right": 1.0}))
    return EpisodeResult(
        task=make_task(uid),
        rollout_n=number,
        agent_name="one",
        status=status,
        fault=fault,
        trajectories=tuple(records),
        scores=scores,
        messages=({"role": "user", "content": "x"},),
        metrics=EpisodeMetrics(num_turns=2, extra={"calls": 3.0}),
    )


def plain(result):
    """Return an episode as values that can be compared."""
    names = ("task", "rollout_n", "status", "fault", "scores", "metrics", "agent_name", "objective")
    return [getattr(result, name) for name in names], [each.to_dict() for each in result.trajectories]


def test_ended_members_are_read_as_they_were_written(tmp_path):
    """Records, scores, faults and metrics of members that wait for their group are the same in another process."""
    results = [episode("a", 0), episode("a", 1, Status.FAILED), evolve(episode("a", 2), trajectories=(), scores=())]
    specs = [EpisodeSpec(task=each.task, agent_name="one", rollout_n=each.rollout_n, num_members=4) for each in results]
    held = [EndedEpisode(spec=spec, result=result) for spec, result in zip(specs, results, strict=True)]
    save_unfinished(tmp_path / "u.jsonl", [*held, UnfinishedEpisode(spec=evolve(specs[0], rollout_n=3))])
    *read, running = load_unfinished(tmp_path / "u.jsonl")

    for before, after in zip(held, read, strict=True):
        np.testing.assert_equal(plain(after.result), plain(before.result))
        assert (before.spec, 4) == (after.spec, after.spec.num_members)
    assert not isinstance(running, EndedEpisode)


def test_a_group_that_continues_takes_its_ended_members_back():
    """Members lose the score of their group, a member that failed with its group runs again, and other groups stay."""
    reward = Best()
    groups = GroupScoring(reward, "it", GroupOptions(n=3, seed=7), Observers(), 1.0)
    call = GroupCall(label="it", num_members=len, put=print, hold=print, ask=_ask(reward))
    scored = asyncio.run(reward.score_members([episode("a", 0), episode("a", 1, Status.FAILED)], call))
    lost = evolve(scored[0], rollout_n=3, status=Status.FAILED, scores=())
    other = episode("b", 0)
    running = UnfinishedEpisode(spec=EpisodeSpec(task=make_task("a"), agent_name="one", rollout_n=2))

    whole, resumed = groups.reopen([*scored, lost, other], [running])

    assert [other] == whole
    assert [2, 0, 1, 3] == [each.spec.rollout_n for each in resumed]
    assert running is resumed[0]
    assert [0.25, None] == [each.result.reward for each in resumed[1:3]]
    assert {"calls": 3.0} == resumed[1].result.metrics.extra
    assert (False, False, 7) == (isinstance(resumed[3], EndedEpisode), resumed[3].started, resumed[3].spec.seed)


def _ask(reward):
    async def ask(episodes, _seconds):
        return reward.score_group(episodes)

    return ask
