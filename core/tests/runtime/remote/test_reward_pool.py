"""A worker's side of reward workers, with fake ones: who is asked, what is tried again, and what comes back."""

import asyncio

import numpy as np
import pytest
from attrs import define, field

from turnwise import Task, TrajectoryScore
from turnwise.driver import Recipe, run_episode
from turnwise.episode import LiveEpisode
from turnwise.episode_setup import EpisodeSpec, Limits, Services
from turnwise.errors import InfrastructureError, TrajectoryError
from turnwise.runtime.ended_episode import EndedEpisode
from turnwise.runtime.reward_pool import RewardAnswer, RewardFailure, RewardPool
from turnwise.runtime.worker import WorkerParts
from turnwise.testing.scripted import RandomPolicy, ScriptedEngine


class OneTurn:
    """Samples one turn."""

    async def step(self, episode):
        if episode.state == "pending":
            episode.begin(np.array([1, 2, 3], np.int32))
            return "generating"
        await episode.generate(max_tokens=20)
        episode.memory["note"] = "kept"
        return "terminated"


class Mean:
    """Scores and measures what can be read of an episode."""

    def score(self, episode):
        value = float(episode.trajectory.response_ids.mean())
        episode.record_metric("seen", 1.0)
        extra = {"left": float(episode.remaining_tokens), "step": float(episode.global_step)}
        assert episode.memory == {"note": "kept"}
        return TrajectoryScore(value=value, extra=extra)


@define
class FakeWorker:
    """Scores as told: with its reward, or by dying, or as a service that fails."""

    reward: object = field(factory=Mean)
    faults: list = field(factory=list)
    asked: int = 0

    async def ask(self, ended, reward_s):
        self.asked += 1
        await asyncio.sleep(0)
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, InfrastructureError):
                return RewardAnswer(failure=RewardFailure.of(fault))
            raise fault
        return RewardAnswer(scores=self.reward.score(ended), recorded=tuple(ended.recorded))


def run(pool, recipe, engine=None):
    """Run one episode with the rewards of a pool, or without a pool."""

    async def go():
        made = engine or ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=255, mean_tokens=9))
        await made.start()
        parts = WorkerParts(engine=made, recipes={"one": recipe}, limits=Limits(reward_s=5.0))
        if pool is not None:
            parts = pool.serve(parts)
        async with asyncio.TaskGroup() as group:
            services = Services(engine=made, spawn=group.create_task)
            spec = EpisodeSpec(task=Task(messages=(), uid="t"), agent_name="one", global_step=4)
            return await run_episode(LiveEpisode(spec, parts.limits, services), parts.recipes["one"])

    return asyncio.run(go())


RECIPE = Recipe(agent=OneTurn(), reward=Mean())


def pool_of(*workers, **options):
    pool = RewardPool(backoff_s=0.001, **options)
    for index, worker in enumerate(workers):
        pool.up(index, worker.ask)
    return pool


def test_scores_and_metrics_are_as_in_the_workers_own_loop():
    """
    Elsewhere or here, a reward reads the same, and the result is the same.
    """
    here, elsewhere = run(None, RECIPE), run(pool_of(FakeWorker()), RECIPE)

    assert here.scores == elsewhere.scores
    assert here.metrics.extra == elsewhere.metrics.extra == {"seen": 1.0}


def test_a_reward_worker_that_dies_is_replaced_by_another():
    """
    The episode is scored by the next one, and the dead one is not asked again.
    """
    dying, living = FakeWorker(faults=[ConnectionError("gone")]), FakeWorker()
    pool = pool_of(dying, living)

    result = run(pool, RECIPE)

    assert result.reward == run(None, RECIPE).reward
    assert (1, 1, 1) == (dying.asked, living.asked, pool.num_retried)


def test_a_service_that_fails_is_tried_again():
    """
    `InfrastructureError` says nothing about the episode, and passes.
    """
    worker = FakeWorker(faults=[InfrastructureError("503"), InfrastructureError("503")])

    assert run(pool_of(worker), RECIPE).reward == run(None, RECIPE).reward
    assert 3 == worker.asked


@pytest.mark.parametrize("fault", [InfrastructureError("503"), ConnectionError("gone")])
def test_tries_are_bounded(fault):
    """
    After the last one the episode has failed, through no fault of the model.
    """
    workers = [FakeWorker(faults=[fault] * 5) for _ in range(4)]

    result = run(pool_of(*workers, max_tries=3), RECIPE)

    assert ("failed", "infra") == (result.status, result.fault.owner)
    assert 3 == sum(worker.asked for worker in workers)


def test_what_a_reward_raises_is_the_rewards_own():
    """
    Any other error is not tried again, and keeps its class and text.
    """

    class Broken:
        async def ask(self, ended, reward_s):
            return RewardAnswer(failure=RewardFailure.of(KeyError("ground_truth")))

    result = run(pool_of(Broken()), RECIPE)

    assert ("reward", "KeyError", "'ground_truth'") == (result.fault.owner, result.fault.kind, result.fault.message)


def test_the_one_with_the_least_to_do_is_asked():
    """
    Episodes spread over the reward workers.
    """

    async def go():
        pool = RewardPool()
        workers = [FakeWorker(), FakeWorker(), FakeWorker()]
        for index, worker in enumerate(workers):
            pool.up(index, worker.ask)
        episode = await _episode()
        async with asyncio.TaskGroup() as group:
            for _ in range(9):
                group.create_task(pool.score(episode))
        return [worker.asked for worker in workers]

    assert [3, 3, 3] == asyncio.run(go())


def test_an_episode_that_kills_takes_others_with_it_only_once():
    """
    After a death each of those that were there is tried without the others, so only the one at fault is given up.
    """

    @define
    class Mortal:
        """Dies with all that it scores when one of them kills."""

        running: set = field(factory=set)

        async def ask(self, ended, reward_s):
            died = asyncio.get_running_loop().create_future()
            self.running.add(died)
            if ended.uid == "killer/0":
                for each in self.running:
                    if not each.done():
                        each.set_exception(ConnectionError("gone"))
            done, _ = await asyncio.wait([died], timeout=0.01)
            self.running.discard(died)
            if done:
                died.result()
            return RewardAnswer(scores=1.0)

    async def go():
        pool, mortal = RewardPool(backoff_s=0.001, max_tries=3), Mortal()

        async def restart():
            while True:
                if not pool._links:
                    pool.up(0, mortal.ask)
                await asyncio.sleep(0.001)

        restarting = asyncio.ensure_future(restart())
        episodes = [await _episode(uid) for uid in ("a", "b", "killer", "c")]
        async with asyncio.TaskGroup() as group:
            scoring = [group.create_task(_outcome(pool, episode)) for episode in episodes]
        restarting.cancel()
        return [each.result() for each in scoring]

    assert [1.0, 1.0, "InfrastructureError", 1.0] == asyncio.run(go())


async def _outcome(pool, episode):
    try:
        return await pool.score(episode)
    except InfrastructureError:
        return "InfrastructureError"


def test_it_waits_for_a_reward_worker_and_fails_when_none_will_come():
    """
    Between two lives it waits; given up it fails at once.
    """

    async def go():
        pool = RewardPool()
        episode = await _episode()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(pool.score(episode))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            pool.up(0, FakeWorker().ask)
        pool.down(0)
        pool.give_up("out of memory")
        with pytest.raises(InfrastructureError, match="every reward worker is dead, the last: out of memory"):
            await pool.score(episode)

    asyncio.run(go())


async def _episode(uid="t"):
    """An episode that has ended."""
    engine = ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=255, mean_tokens=9))
    await engine.start()
    services = Services(engine=engine, spawn=asyncio.ensure_future)
    spec = EpisodeSpec(task=Task(messages=(), uid=uid), agent_name="one")
    episode = LiveEpisode(spec, Limits(), services)
    await run_episode(episode, Recipe(agent=OneTurn()))
    return episode


def test_an_episode_that_has_ended_cannot_go_on():
    """
    A reward that tries to continue an episode is told that it cannot.
    """
    ended = asyncio.run(_ended())

    assert ("t/0", False, 3) == (ended.uid, ended.validation, ended.trajectory.num_prompt_tokens)
    for action in (ended.begin, ended.generate, ended.observe, ended.force, ended.call_tool, ended.interact):
        with pytest.raises(TrajectoryError, match="episode t/0 has ended"):
            action(np.array([1]))


async def _ended():
    return EndedEpisode.of(await _episode())
