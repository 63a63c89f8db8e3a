"""The manager and the local runtime: order, interrupts, and results that do not depend on how work is split."""

import asyncio
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import EpisodeResult, SamplingParams, State, Status, Task, Trajectory
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.errors import ConfigError, DataError, DuplicateNameError, EngineError, PluginError, TurnwiseError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerComponents
from turnwise_testing.engines.scripted import Failure, RandomPolicy, ScriptedEngine

END = 255


@define
class ThreeTurns:
    """Samples three turns with an observation between them; the prompt is the task's uid."""

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), np.uint8))
            return State.GENERATING
        result = await episode.generate()
        if len(episode.trajectory.turns()) == 3:
            return State.TERMINATED
        episode.observe(result.token_ids[:2])
        return State.GENERATING


class SumReward:
    """A score that depends on every sampled id."""

    def score(self, episode):
        return float(episode.trajectory.response_ids.sum() % 97)


def tasks(count, **fields):
    return [
        Task(messages=({"role": "user", "content": "hi"},), uid=f"task{i}", sample_index=i, **fields)
        for i in range(count)
    ]


def manager(engine=None, *, num_workers=1, max_in_flight=256, limits=None, observers=(), **plan):
    engine = engine or ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=END, mean_tokens=12))
    heard = Observers.of(observers)
    parts = WorkerComponents(
        engine=engine,
        programs={"three_turns": EpisodeProgram(agent=ThreeTurns(), reward=SumReward())},
        limits=limits or Limits(response_length=200),
        stop_token_ids=(END,),
        max_in_flight=max_in_flight,
        observers=heard,
    )
    plan.setdefault("sampling", SamplingParams(max_tokens=40))
    made = RolloutPlan(default_agent="three_turns", agents={"three_turns": None}, **plan)
    return RolloutManager(LocalRuntime(engine, parts, num_workers), made, heard)


def content(result):
    """Return the parts of a result that must not depend on time."""
    return (
        result.uid,
        result.status,
        result.reward,
        [t.input_ids.tolist() + t.response_mask.tolist() + t.logprobs.tolist() for t in result.trajectories],
    )


def test_an_agent_that_excludes_the_engine_stops_the_start():
    """Also where the engine runs in another process, and is known once it has started; it is stopped again."""

    class Picky:
        def check_engine(self, capabilities):
            raise ConfigError(f"agent.form needs {capabilities.max_context}")

    engine = ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=END, mean_tokens=12))
    with pytest.raises(ConfigError, match=r"agent\.form needs"):
        manager(engine, engine_checks=[Picky()]).start()
    with pytest.raises(EngineError, match="stopped"):
        asyncio.run(engine.generate(None))


def test_rows_come_in_the_order_of_the_tasks():
    """The rollouts of a task are adjacent and numbered, in whatever order they finish."""
    with manager(n=3) as running:
        results = running.rollout(tasks(4), global_step=7)

    assert [(r.task.uid, r.rollout_n) for r in results] == [(f"task{i}", n) for i in range(4) for n in range(3)]
    assert {r.global_step for r in results} == {7}
    assert {r.status for r in results} <= {Status.COMPLETED, Status.TRUNCATED}


def test_rollouts_of_a_group_differ():
    """Every rollout of a task derives its own seeds."""
    with manager(n=4) as running:
        results = running.rollout(tasks(1))

    assert len({tuple(r.trajectories[0].response_ids.tolist()) for r in results}) == 4


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 0.003]),
)
def test_batches_do_not_depend_on_workers_or_arrival(num_workers, max_in_flight, rng, latency):
    """A fixed seed gives one batch, bit for bit, for any number of workers and any order of answers."""
    policy = RandomPolicy(seed=1, end_token_id=END, mean_tokens=12)
    shuffled = ScriptedEngine(policy=policy, latency_s=lambda _request: rng.random() * latency)
    with manager(n=2) as running:
        expected = running.generate(tasks(6))
    with manager(shuffled, num_workers=num_workers, max_in_flight=max_in_flight, n=2) as running:
        batch = running.generate(tasks(6))

    for name in ("input_ids", "response_mask", "rollout_log_probs", "rm_scores", "position_ids", "attention_mask"):
        assert getattr(batch, name).equal(getattr(expected, name)), name
    assert batch.rows == expected.rows


def test_max_in_flight_bounds_a_worker():
    """No worker runs more than `max_in_flight` episodes at once."""

    @define
    class Gauge(Observer):
        now: int = 0
        most: int = 0

        def on_episode_started(self, event):
            self.now += 1
            self.most = max(self.most, self.now)

        def on_episode_finished(self, event):
            self.now -= 1

    gauge = Gauge()
    engine = ScriptedEngine(policy=RandomPolicy(end_token_id=END, mean_tokens=5), latency_s=0.001)
    with manager(engine, max_in_flight=3, observers=[gauge]) as running:
        running.rollout(tasks(20))

    assert (gauge.most, gauge.now) == (3, 0)


def test_a_failing_request_fails_one_episode():
    """The other episodes finish, and the failed one has a batch row that is masked from the loss."""
    with manager(ScriptedEngine(policy=RandomPolicy(end_token_id=END), failures={2: Failure.ERROR})) as running:
        results = running.rollout(tasks(8))
        batch = running.collate(results)

    failed = [r for r in results if r.status is Status.FAILED]
    assert [r.fault.owner for r in failed] == ["engine"]
    assert len(batch) == 8
    assert int(batch.loss_mask[results.index(failed[0])].sum()) == 0


def test_iterate_yields_as_they_finish():
    """A short episode is returned before a long one ends."""
    held = threading.Event()

    class Held(ScriptedEngine):
        async def generate(self, request):
            if request.group_id == "task0":
                await asyncio.to_thread(held.wait, 600)
            return await super().generate(request)

    uids = []
    with manager(Held(policy=RandomPolicy(end_token_id=END))) as running:
        for result in running.iterate(tasks(3)):
            uids.append(result.task.uid)
            if len(uids) == 2:
                held.set()

    assert sorted(uids) == ["task0", "task1", "task2"]
    assert uids[-1] == "task0"


def test_stream_runs_on_the_callers_loop():
    """An asynchronous caller gets the same episodes."""

    async def collect(running):
        return [result async for result in running.stream(tasks(5))]

    with manager() as running:
        streamed = asyncio.run(collect(running))
        again = running.rollout(tasks(5))

    assert sorted(map(content, streamed)) == sorted(map(content, again))


def test_leaving_a_stream_aborts_the_rest():
    """No episode continues after its caller has left the loop."""
    finished = []

    class Recorder(Observer):
        def on_episode_finished(self, event):
            finished.append(event.status)

    engine = ScriptedEngine(
        policy=RandomPolicy(end_token_id=END), latency_s=lambda r: 0.0 if r.group_id == "task0" else 30.0
    )

    async def first(running):
        stream = running.stream(tasks(3))
        result = await anext(stream)
        await stream.aclose()
        return result

    with manager(engine, observers=[Recorder()]) as running:
        assert asyncio.run(first(running)).task.uid == "task0"
        running.rollout(tasks(1))

    assert finished.count(Status.ABORTED) == 2


def test_an_abort_returns_every_episode():
    """Every episode has a result: finished, aborted with its partial record, or not started."""
    sampled = {"task0": threading.Event(), "task1": threading.Event()}

    def token_latency_s(request, index):
        sampled[request.group_id].set()
        return 30.0 if index else 0.0  # one token at once, and no other before the abort

    engine = ScriptedEngine(policy=RandomPolicy(mean_tokens=50), token_latency_s=token_latency_s)
    with manager(engine, max_in_flight=2) as running:
        episodes = running.iterate(tasks(6))
        assert all(event.wait(timeout=600) for event in sampled.values())
        running.abort()
        results = list(episodes)

    assert len(results) == 6
    assert {r.status for r in results} == {Status.ABORTED}
    started = [r for r in results if r.trajectories]
    assert len(started) == 2
    assert all(r.trajectories[0].num_response_tokens > 0 for r in started)


def test_an_interrupt_does_not_end_the_iteration():
    """After an exception in the caller's thread the iterator still returns every episode."""
    with manager() as running:
        episodes = running.iterate(tasks(4))
        next(episodes)
        with pytest.raises(KeyboardInterrupt):
            raise KeyboardInterrupt
        assert len(list(episodes)) == 3
        assert list(episodes) == []


@pytest.mark.parametrize("policy", ["error", "drop", "truncate_left"])
def test_long_prompts(policy):
    """By the policy, a long prompt ends the run with one line, is left out, or is truncated."""
    limits = Limits(prompt_length=5, response_length=50, prompt_policy=policy)
    rows = [*tasks(2), Task(messages=({"role": "user", "content": "x"},), uid="task-is-long")]
    with manager(limits=limits, prompt_policy=policy) as running:
        if policy == "error":
            with pytest.raises(DataError, match=r"has 12 tokens, more than prompt_length=5; raise it, or set data"):
                running.rollout(rows)
        else:
            uids = [r.task.uid for r in running.rollout(rows)]
            assert uids == ["task0", "task1"] + (["task-is-long"] if policy == "truncate_left" else [])
            stats = running.stats()
            assert (int(policy == "drop"), 0) == (stats["dropped"], stats["failed"])


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "no tasks to run"),
        (tasks(1, agent_name="three_turn"), "row 0 .* unknown agent 'three_turn'; did you mean 'three_turns'"),
    ],
)
def test_bad_tasks_are_rejected(rows, text):
    """The error comes before any episode starts."""
    with manager() as running, pytest.raises(DataError, match=text):
        running.rollout(rows)


def test_validation_has_its_own_sampling():
    """Validation has its own number of rollouts and sampling parameters."""
    engine = ScriptedEngine(policy=RandomPolicy(end_token_id=END))
    greedy = SamplingParams(temperature=0.0, max_tokens=9)
    with manager(engine, n=4, validation_n=2, validation_sampling=greedy) as running:
        results = running.rollout(tasks(1), validation=True)

    assert len(results) == 2
    assert all(r.validation for r in results)
    assert {r.sampling.temperature for r in engine.requests} == {0.0}
    assert content(results[0])[2:] == content(results[1])[2:]


def test_an_engine_that_cannot_start_stops_the_manager():
    """The caller gets the engine's own error, and the manager is stopped."""

    class Broken(ScriptedEngine):
        async def start(self):
            raise EngineError("no weights in /nowhere")

    running = manager(Broken())
    with pytest.raises(EngineError, match="no weights"):
        running.start()
    with pytest.raises(TurnwiseError, match="not running"):
        running.rollout(tasks(1))


def test_two_runs_at_once():
    """Two calls at the same time have the same results as one after the other."""
    engine = ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=END, mean_tokens=12), latency_s=0.002)
    with manager(engine) as running:
        expected = sorted(map(content, running.rollout(tasks(5))))
        first, second = running.iterate(tasks(5)), running.iterate(tasks(5))
        got = [next(first), next(second), *first], list(second)

    assert sorted(map(content, [got[0][0], *got[0][2:]])) == expected
    assert sorted(map(content, [got[0][1], *got[1]])) == expected


def test_public_names_are_there():
    """Every name of `__all__` can be imported, and an unknown name raises AttributeError."""
    import turnwise
    import turnwise_testing

    for module in (turnwise, turnwise_testing):
        assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = module.nonsense


def test_starting_and_stopping_twice():
    """A second start and a second stop do nothing."""
    running = manager()
    running.start()
    running.start()
    running.stop()
    running.stop()


def test_weight_updates_are_events():
    """Each updated replica emits an event with the version and the duration."""

    class Recorder(Observer):
        def __init__(self):
            self.events = []

        def on_weights_updated(self, event):
            self.events.append(event)

    recorder = Recorder()
    with manager(observers=[recorder]) as running:
        running.update_weights([("w", np.zeros(4, np.float32))], version=3)

    (event,) = recorder.events
    assert (event.version, event.replica, event.num_bytes) == (3, 0, 16)
    assert event.seconds >= 0


def test_versions_of_weights_only_rise():
    """A version that was used would mix the tokens of two policies."""
    with manager() as running:
        running.update_weights([("w", np.zeros(4, np.float32))], version=3)
        with pytest.raises(ValueError, match="weight version 3 is not above the last one, 3"):
            running.update_weights([("w", np.ones(4, np.float32))], version=3)
        assert 4 == running.update_weights([("w", np.ones(4, np.float32))]).version


class SizedEngine(ScriptedEngine):
    """A scripted engine with 16 bytes of weights and 30 of cache."""

    def __init__(self):
        super().__init__(RandomPolicy())
        self.bytes = {"weights": 16, "kv_cache": 30}

    def stats(self):
        return {**super().stats(), "memory_bytes": float(sum(self.bytes.values()))}

    async def sleep(self, level):
        await super().sleep(level)
        self.bytes = {}

    async def wake_up(self, tags):
        await super().wake_up(tags)
        self.bytes |= {tag: {"weights": 16, "kv_cache": 30}[tag] for tag in tags}


def test_memory_is_given_up_and_taken_again():
    """While the engine sleeps its episodes fail with a reason, and after the wake-up they run."""
    with manager() as running:
        assert 0 == running.memory_bytes()  # unknown
        running.sleep()
        (asleep,) = running.rollout(tasks(1))
        running.wake_up()
        (awake,) = running.rollout(tasks(1))

    assert (Status.FAILED, "engine", "AsleepError") == (asleep.status, asleep.fault.owner, asleep.fault.kind)
    assert Status.COMPLETED == awake.status


def test_sleep_and_wake_up_are_events():
    """Each sleep and wake-up is an event with seconds and bytes, also when the caller uses no memory switch."""

    class Recorder(Observer):
        def __init__(self):
            self.events = []

        def on_memory_switched(self, event):
            self.events.append(event)

    recorder = Recorder()
    with manager(SizedEngine(), observers=[recorder]) as running:
        running.sleep()
        running.wake_up(("weights",))
        running.wake_up(("kv_cache",))
        running.sleep()
        running.wake_up()

    assert [
        ("sleep", 46, 0),
        ("wake_up_weights", 0, 16),
        ("wake_up_kv_cache", 16, 46),
        ("sleep", 46, 0),
        ("wake_up_weights_kv_cache", 0, 46),
    ] == [(event.stage, event.bytes_before, event.bytes_after) for event in recorder.events]
    assert all(event.seconds >= 0 and event.started_at > 0 for event in recorder.events)


class Doubled:
    """A postprocessor: twice the episode's reward."""

    def process(self, batch):
        return {"doubled": 2 * batch.episode_rewards}


def test_postprocessors_add_their_fields():
    """To a padded batch and to a packed one, the same values for the same rows."""
    with manager(postprocessors={"doubled": Doubled()}) as running:
        results = running.rollout(tasks(3))
        batch, packed = running.collate(results), running.collate_packed(results)

    expected = [2 * result.reward for result in results]
    assert expected == batch.fields["doubled"].tolist() == packed.fields["doubled"].tolist()


class Halves:
    """A postprocessor with a value for each response token, and for each token."""

    def process(self, batch):
        rows = batch.split(batch.input_ids)
        lens = batch.prompt_lens.tolist()
        return {
            "half": [row[length:] / 2 for row, length in zip(rows, lens, strict=True)],
            "pair": [torch.stack([row, -row], 1) for row in rows],
        }


def test_fields_of_tokens_fit_padded_and_packed_batches():
    """Each value is beside its token in both; pads hold 0."""
    with manager(postprocessors={"halves": Halves()}) as running:
        results = running.rollout(tasks(3))
        batch, packed = running.collate(results), running.collate_packed(results)

    real = batch.attention_mask.bool()
    assert torch.equal(batch.fields["half"], batch.responses / 2 * real[:, batch.prompt_length :])
    assert torch.equal(batch.fields["pair"][..., 1][real], -batch.input_ids[real].int())
    assert torch.equal(packed.fields["pair"][:, 0], packed.input_ids)
    for row, half, length in zip(
        packed.split(packed.input_ids), packed.split(packed.fields["half"]), packed.prompt_lens.tolist(), strict=True
    ):
        assert torch.equal(half, row[length:] / 2)


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        (lambda batch: {"uid": batch.episode_rewards}, DuplicateNameError, "'uid'"),
        (lambda batch: {"prompts": batch.episode_rewards}, DuplicateNameError, "'prompts'"),
        (lambda batch: {"split": batch.episode_rewards}, DuplicateNameError, "'split'"),
        (lambda batch: {"half": batch.input_ids}, PluginError, "has shape"),
        (lambda batch: {"half": [row[:1] for row in batch.split(batch.input_ids)]}, PluginError, "tensors of lengths"),
        (lambda batch: {"half": [torch.tensor(1.0)] * len(batch)}, PluginError, "tensors of lengths"),
        (lambda batch: None, PluginError, "AttributeError: 'NoneType'"),
        (lambda batch: {3: batch.episode_rewards}, PluginError, "TypeError"),
        (lambda batch: {"half": 1 / 0}, PluginError, "ZeroDivisionError: division by zero"),
    ],
)
def test_fields_that_do_not_fit(values, error, text):
    """The error names the postprocessor, whether it raised or the values do not fit."""
    part = Doubled()
    part.process = values
    with manager(postprocessors={"part 'x' of plugin 'y'": part}) as running:
        results = running.rollout(tasks(3))
        with pytest.raises(error, match=f"^part 'x' of plugin 'y': .*{text}"):
            running.collate_packed(results)


def test_postprocessors_take_no_memory_for_pads():
    """One long row among many short ones: the peak stays far below the rectangle that pads would make."""
    long, short = 40_000, 300

    def result(number, length):
        record = Trajectory(np.arange(4, dtype=np.int32))
        record.add_action(np.zeros(length, np.int32), np.zeros(length, np.float32), weight_version=0)
        return EpisodeResult(task=tasks(number + 1)[number], status=Status.COMPLETED, trajectories=(record,))

    results = [result(0, long), *(result(number, 4) for number in range(1, short))]
    running = manager(postprocessors={"halves": Halves()})
    running.collate_packed(results)  # imports, which would count
    tracemalloc.start()
    try:
        packed = running.collate_packed(results)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    num_bytes = sum(tensor.nbytes for tensor in (*packed.tensors.values(), *packed.fields.values()))
    assert peak < 4 * num_bytes
    assert 20 * num_bytes < 8 * long * short
