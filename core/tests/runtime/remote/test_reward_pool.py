"""The reward client of a worker, with fake reward workers: choice of a worker, retries, and results."""

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest
from attrs import define, field

from turnwise import Task, TrajectoryScore
from turnwise.episode.driver import EpisodeProgram, run_episode
from turnwise.episode.live import LiveEpisode
from turnwise.episode.setup import EpisodeContext, Limits
from turnwise.errors import InfrastructureError, TrajectoryError
from turnwise.record.spec import EpisodeSpec
from turnwise.runtime.remote.episode_snapshot import EpisodeSnapshot
from turnwise.runtime.remote.reward_pool import RewardFailure, RewardPool, RewardReply
from turnwise.runtime.worker import WorkerComponents
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine


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
    """Reads every attribute of an episode that a reward may read."""

    def score(self, episode):
        value = float(episode.trajectory.response_ids.mean())
        episode.record_metric("seen", 1.0)
        extra = {"left": float(episode.remaining_tokens), "step": float(episode.global_step)}
        assert episode.memory == {"note": "kept"}
        return TrajectoryScore(value=value, extra=extra)


@define
class FakeWorker:
    """A reward worker that raises the next of `faults`, or replies with it as an error of a service."""

    reward: object = field(factory=Mean)
    faults: list = field(factory=list)
    num_scores: int = 0

    async def score(self, snapshot, reward_s):
        self.num_scores += 1
        await asyncio.sleep(0)
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, InfrastructureError):
                return RewardReply(failure=RewardFailure.of(fault))
            raise fault
        return RewardReply(scores=self.reward.score(snapshot), recorded=tuple(snapshot.recorded))


def run(pool, program, engine=None):
    """Run one episode whose reward is in a pool, or in the worker itself."""

    async def go():
        made = engine or ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=255, mean_tokens=9))
        await made.start()
        parts = WorkerComponents(engine=made, programs={"one": program}, limits=Limits(reward_s=60.0))
        if pool is not None:
            parts = pool.attach(parts)
        async with asyncio.TaskGroup() as group:
            services = EpisodeContext(engine=made, spawn=group.create_task)
            spec = EpisodeSpec(task=Task(messages=(), uid="t"), agent_name="one", global_step=4)
            return await run_episode(LiveEpisode(spec, parts.limits, services), parts.programs["one"])

    return asyncio.run(go())


PROGRAM = EpisodeProgram(agent=OneTurn(), reward=Mean())


def make_pool(*workers, **options):
    pool = RewardPool(backoff_s=0.001, **options)
    for index, worker in enumerate(workers):
        pool.worker_up(index, worker.score)
    return pool


def test_scores_and_metrics_do_not_depend_on_the_process():
    """A reward reads the same episode and gives the same result in a reward worker and in the worker."""
    here, elsewhere = run(None, PROGRAM), run(make_pool(FakeWorker()), PROGRAM)

    assert here.scores == elsewhere.scores
    assert here.metrics.extra == elsewhere.metrics.extra == {"seen": 1.0}


def test_another_reward_worker_replaces_a_dead_one():
    """The next one scores the episode, and the dead one gets no request."""
    dying, living = FakeWorker(faults=[ConnectionError("gone")]), FakeWorker()
    pool = make_pool(dying, living)

    result = run(pool, PROGRAM)

    assert result.reward == run(None, PROGRAM).reward
    assert (1, 1, 1) == (dying.num_scores, living.num_scores, pool.num_retried)


def test_a_failed_service_is_retried():
    """`InfrastructureError` of a reward is temporary."""
    worker = FakeWorker(faults=[InfrastructureError("503"), InfrastructureError("503")])

    assert run(make_pool(worker), PROGRAM).reward == run(None, PROGRAM).reward
    assert 3 == worker.num_scores


@define
class BuiltAtLookup(Mapping):
    """Programs that note each name that is looked up; the one of `broken` cannot be built."""

    looked_up: list = field(factory=list)

    def __getitem__(self, name):
        self.looked_up.append(name)
        if name == "broken":
            raise InfrastructureError("no GPU")
        return {"scored": PROGRAM, "unscored": EpisodeProgram(agent=OneTurn())}[name]

    def __contains__(self, name):
        return name in tuple(self)

    def __iter__(self):
        return iter(("broken", "scored", "unscored"))

    def __len__(self):
        return 3


def test_programs_are_built_at_their_lookup():
    """A pool builds no agent that no episode names, and gives its reward to programs that have one."""
    programs, pool = BuiltAtLookup(), make_pool()
    parts = WorkerComponents(engine=ScriptedEngine(), programs=programs, limits=Limits(reward_s=60.0))
    attached = pool.attach(parts).programs

    assert ["broken", "scored", "unscored"] == list(attached)
    assert (3, True, False) == (len(attached), "broken" in attached, "other" in attached)
    assert [] == programs.looked_up
    assert (pool, None) == (attached["scored"].reward, attached["unscored"].reward)
    with pytest.raises(InfrastructureError, match="no GPU"):
        attached["broken"]
    with pytest.raises(KeyError):
        attached["other"]


@pytest.mark.parametrize("fault", [InfrastructureError("503"), ConnectionError("gone")])
def test_attempts_are_limited(fault):
    """After the last attempt the episode has failed, owned by the infrastructure."""
    workers = [FakeWorker(faults=[fault] * 5) for _ in range(4)]

    result = run(make_pool(*workers, max_tries=3), PROGRAM)

    assert ("failed", "infra") == (result.status, result.fault.owner)
    assert 3 == sum(worker.num_scores for worker in workers)


def test_an_error_of_a_reward_is_not_retried():
    """It is owned by the reward, and keeps its class and text."""

    class Broken:
        async def score(self, snapshot, reward_s):
            return RewardReply(failure=RewardFailure.of(KeyError("ground_truth")))

    result = run(make_pool(Broken()), PROGRAM)

    assert ("reward", "KeyError", "'ground_truth'") == (result.fault.owner, result.fault.kind, result.fault.message)


def test_the_least_loaded_reward_worker_is_chosen():
    """Episodes spread evenly over the reward workers."""

    async def go():
        pool = RewardPool()
        workers = [FakeWorker(), FakeWorker(), FakeWorker()]
        for index, worker in enumerate(workers):
            pool.worker_up(index, worker.score)
        episode = await _episode()
        async with asyncio.TaskGroup() as group:
            for _ in range(9):
                group.create_task(pool.score(episode))
        return [worker.num_scores for worker in workers]

    assert [3, 3, 3] == asyncio.run(go())


def test_an_episode_that_kills_fails_no_other_episode():
    """After a death, each episode that was there is retried without the others, so only the harmful one fails."""

    @define
    class Mortal:
        """Fails all its scores if one episode is harmful."""

        running: set = field(factory=set)

        async def score(self, snapshot, reward_s):
            died = asyncio.get_running_loop().create_future()
            self.running.add(died)
            if snapshot.uid == "killer/0":
                for each in self.running:
                    if not each.done():
                        each.set_exception(ConnectionError("gone"))
            done, _ = await asyncio.wait([died], timeout=0.01)
            self.running.discard(died)
            if done:
                died.result()
            return RewardReply(scores=1.0)

    async def go():
        pool, mortal = RewardPool(backoff_s=0.001, max_tries=3), Mortal()

        async def restart():
            while True:
                if not pool._links:
                    pool.worker_up(0, mortal.score)
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


def test_a_score_waits_for_a_restart_and_fails_when_none_follows():
    """While reward workers restart, scores wait; after they are given up, scores fail at once."""

    async def go():
        pool = RewardPool()
        episode = await _episode()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(pool.score(episode))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            pool.worker_up(0, FakeWorker().score)
        pool.worker_down(0)
        pool.give_up("out of memory")
        with pytest.raises(InfrastructureError, match="every reward worker is dead, the last: out of memory"):
            await pool.score(episode)

    asyncio.run(go())


async def _episode(uid="t"):
    """Return a finished episode."""
    engine = ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=255, mean_tokens=9))
    await engine.start()
    services = EpisodeContext(engine=engine, spawn=asyncio.ensure_future)
    spec = EpisodeSpec(task=Task(messages=(), uid=uid), agent_name="one")
    episode = LiveEpisode(spec, Limits(), services)
    await run_episode(episode, EpisodeProgram(agent=OneTurn()))
    return episode


def test_a_reward_cannot_continue_an_episode():
    """Every method of a snapshot that would continue the episode raises an error."""
    snapshot = asyncio.run(_snapshot())

    assert ("t/0", False, 3) == (snapshot.uid, snapshot.validation, snapshot.trajectory.num_prompt_tokens)
    for name in ("begin", "generate", "observe", "force", "call_tool", "interact"):
        with pytest.raises(TrajectoryError, match="episode t/0 is finished"):
            getattr(snapshot, name)(np.array([1]))


async def _snapshot():
    return EpisodeSnapshot.of(await _episode())
