"""Tasks that are submitted while others run have the results of one call, and no call waits for ever."""

import asyncio
import gc
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import SamplingParams, State, Status, Task
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.errors import DataError, TurnwiseError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerComponents
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine


class TwoTurns:
    """Two turns with an observation between them."""

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), np.uint8))
            return State.GENERATING
        await episode.generate()
        if len(episode.trajectory.turns()) == 2:
            return State.TERMINATED
        episode.observe(np.array([1, 2]))
        return State.GENERATING


def token_s(request, _index):
    """Return the seconds for each token: the episodes of slow tasks never end."""
    return 60.0 if request.group_id.startswith("slow") else 0.0


def make_manager(*, num_workers=1, max_in_flight=256, observers=(), **plan):
    """Return a manager of a scripted engine."""
    engine = ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=255, mean_tokens=12), token_latency_s=token_s)
    heard = Observers.of(observers)
    parts = WorkerComponents(
        engine=engine,
        programs={"two": EpisodeProgram(agent=TwoTurns())},
        limits=Limits(response_length=200),
        stop_token_ids=(255,),
        max_in_flight=max_in_flight,
        observers=heard,
    )
    made = RolloutPlan(default_agent="two", agents={"two": None}, sampling=SamplingParams(max_tokens=40), **plan)
    return RolloutManager(LocalRuntime(engine, parts, num_workers), made, heard)


def make_task(uid, **fields):
    return Task(messages=({"role": "user", "content": "x"},), uid=uid, **fields)


def content(results):
    """Return the parts of results that must not depend on time, by uid."""
    return {
        result.uid: (result.status, result.global_step, [t.input_ids.tolist() for t in result.trajectories])
        for result in results
    }


def wait_until(condition):
    """Wait for an event of another thread."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@settings(max_examples=25, deadline=None)
@given(
    uids=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12),
    reads=st.lists(st.booleans(), min_size=12, max_size=12),
    num_workers=st.integers(1, 3),
    max_in_flight=st.integers(1, 4),
    n=st.integers(1, 3),
)
def test_results_are_those_of_one_call(uids, reads, num_workers, max_in_flight, n):
    """Whenever tasks come and results are read, episodes equal those of a call with the whole list."""
    tasks = [make_task(uid) for uid in uids]
    with make_manager(num_workers=num_workers, max_in_flight=max_in_flight, n=n) as running:
        expected = running.rollout(tasks, global_step=3)
        feed, results, num = running.open(global_step=3), [], 0
        for task, read in zip(tasks, reads, strict=False):
            num += feed.submit(task)
            if read:
                results.append(next(iter(feed)))
        feed.close()
        feed.close()
        results += feed

        assert num == len(results) == len(expected)
        assert content(expected) == content(results)
        assert [] == list(feed)
        assert not running._calls


def test_an_async_loop():
    """An async loop waits for tasks that come from another thread, and its cancellation loses no result."""
    with make_manager(n=2) as running:
        feed = running.open()

        async def collect():
            results = []
            for uid in "abc":
                with suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        results.append(await anext(aiter(feed)))
                await asyncio.to_thread(feed.submit, make_task(uid))
            feed.close()
            async for result in feed:
                results.append(result)
            return results

        results = asyncio.run(collect())
        expected = running.rollout([make_task(uid) for uid in "abc"])

    assert content(expected) == content(results)


def test_one_episode_of_a_group():
    """`rollout_n` runs the episode of this number alone, with the seed that it has in its group."""
    with make_manager(n=3) as running:
        expected = running.rollout([make_task("a")])
        with running.open() as feed:
            assert 1 == feed.submit(make_task("a"), rollout_n=2)
            feed.close()
            assert content(expected[2:]) == content(feed)


def test_a_limit_bounds_the_open_episodes():
    """Beyond the limit a submit waits until a result is taken; a rejected one takes no number of its group."""
    with make_manager(n=2) as running, running.open(limit=4) as feed:
        for uid in "ab":
            feed.submit(make_task(uid))
        with pytest.raises(TimeoutError, match="4 of 4 episodes are open"):
            feed.submit(make_task("c"), timeout_s=0)
        results = [next(iter(feed)), next(iter(feed))]
        feed.submit(make_task("c"), timeout_s=0)
        feed.close()
        results += feed

        assert {f"{uid}/{number}" for uid in "abc" for number in range(2)} == {result.uid for result in results}
    with make_manager(n=2) as running, running.open(limit=1) as feed, pytest.raises(ValueError, match="more than the"):
        feed.submit(make_task("a"))


def test_a_task_with_an_unknown_agent():
    """A task that cannot run is refused, and leaves room for others."""
    with make_manager() as running, running.open(limit=1) as feed:
        with pytest.raises(DataError, match="unknown agent"):
            feed.submit(make_task("a", agent_name="none"))
        feed.submit(make_task("b"), timeout_s=0)
        feed.close()
        assert ["b"] == [result.task.uid for result in feed]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_abort_closes_the_feed(num_workers):
    """After an abort every submitted episode has a result, the loop ends, and no more tasks are accepted."""
    with make_manager(num_workers=num_workers, max_in_flight=2) as running, running.open() as feed:
        for number in range(9):
            feed.submit(make_task(f"slow{number}"))
        running.abort()

        assert [Status.ABORTED] * 9 == [result.status for result in feed]
        wait_until(lambda: feed._open._closed)
        with pytest.raises(TurnwiseError, match="the task feed is closed"):
            feed.submit(make_task("a"))
        assert 9 == len(running.unfinished)


class Starts(Observer):
    """Says when an episode runs."""

    def __init__(self):
        self.started = threading.Event()

    def on_episode_started(self, _event):
        self.started.set()


@pytest.mark.parametrize("dropped", [False, True])
def test_an_abandoned_feed_leaves_nothing(dropped):
    """If the feed is dropped or its block is left, its episodes end and are forgotten; other calls continue."""
    starts = Starts()
    with make_manager(observers=[starts], max_in_flight=1) as running:
        feed, other = running.open(), running.open()
        for number in range(5):
            feed.submit(make_task(f"slow{number}"))
        assert starts.started.wait(60)
        if dropped:
            del feed
            gc.collect()
        else:
            with feed:
                pass
        wait_until(lambda: len(running._calls) == 1)

        other.submit(make_task("a"))
        other.close()
        assert [Status.COMPLETED] == [result.status for result in other]
        assert () == running.unfinished
        assert not running.runtime._workers


class BrokenError(Exception):
    """A bug of the runtime."""


@pytest.mark.parametrize("ending", ["error", "stop"])
def test_nobody_waits_for_a_call_that_has_ended(monkeypatch, ending):
    """If the runtime fails or stops, a reader gets an error or the end, and a submit that waits for room is refused."""
    with make_manager() as running:
        broken = asyncio.Event()

        async def fail(_runtime, _feed, _deliver, _interrupt):
            await broken.wait()
            raise BrokenError

        monkeypatch.setattr(LocalRuntime, "run", fail if ending == "error" else LocalRuntime.run)
        feed, refused = running.open(limit=1), []
        feed.submit(make_task("a"))

        def submit():
            with pytest.raises(TurnwiseError, match="the task feed is closed"):
                feed.submit(make_task("b"))
            refused.append(True)

        waiting = threading.Thread(target=submit)
        waiting.start()
        if ending == "error":
            running._thread.loop.call_soon_threadsafe(broken.set)
            with pytest.raises(BrokenError):
                next(iter(feed))
        else:
            running.stop()
            with suppress(asyncio.CancelledError):  # an episode that finished before the end is a result
                assert {result.task.uid for result in feed} <= {"a"}
        assert [] == list(feed)
        waiting.join()
        assert [True] == refused
