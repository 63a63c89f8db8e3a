"""The fake engine is deterministic, stops like a real one, and fails on demand."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import EngineError, ReplicaDiedError
from turnwise.types import Capabilities, FinishReason, GenerateRequest, SamplingParams
from turnwise_testing.engines.scripted import Failure, RandomPolicy, ScriptedEngine

TURN = [5, 6, 7, 8, 9]


def ask(token_ids=(1, 2, 3), request_id="a", **sampling):
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return GenerateRequest(request_id=request_id, trajectory_id="t", token_ids=list(token_ids), sampling=params)


def serve(engine, scenario):
    async def main():
        await engine.start()
        async with asyncio.timeout(10):
            return await scenario(engine)

    return asyncio.run(main())


def answer(engine, request):
    return serve(engine, lambda engine: engine.generate(request))


async def begin(group, engine, request):
    """Send a request and return its task once it is in flight."""
    task = group.create_task(engine.generate(request))
    await in_flight(engine)
    return task


async def in_flight(engine):
    while not engine.stats()["num_running"]:  # noqa: ASYNC110 - an engine has no event for it
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("sampling", "token_ids", "finish_reason", "stop_reason"),
    [
        ({"stop_token_ids": (7,)}, [5, 6, 7], FinishReason.STOP, 7),
        ({"max_tokens": 2}, [5, 6], FinishReason.LENGTH, None),
        ({"max_tokens": 3, "stop_token_ids": (7, 8)}, [5, 6, 7], FinishReason.STOP, 7),
        ({"max_tokens": 5}, TURN, FinishReason.LENGTH, None),
        ({"max_tokens": 6}, TURN, FinishReason.STOP, None),
    ],
)
def test_a_script_is_cut_as_a_real_engine_would(sampling, token_ids, finish_reason, stop_reason):
    """At the first stop id, which stays, or at max_tokens; a script that ends earlier ends the turn."""
    result = answer(ScriptedEngine(lambda _: TURN), ask(**sampling))

    assert result.token_ids.tolist() == token_ids
    assert (result.finish_reason, result.stop_reason) == (finish_reason, stop_reason)


def test_a_mapping_answers_by_how_the_context_ends():
    """The longest ending that is there wins; a context with none is an error that shows its end."""
    script = {(3,): [1], (2, 3): [2], (1, 2, 3, 4): [3]}

    async def scenario(engine):
        with pytest.raises(EngineError, match=r"no output for a context that ends in \[9\]"):
            await engine.generate(ask([9]))
        return [(await engine.generate(ask(context))).token_ids.tolist() for context in ([3], [1, 2, 3], [1, 2, 3, 4])]

    assert serve(ScriptedEngine(script), scenario) == [[1], [2], [3]]


@given(contexts=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=6), min_size=2, max_size=8), data=st.data())
@settings(max_examples=30)
def test_answers_do_not_depend_on_order_or_company(contexts, data):
    """The random policy knows the seed, the context and the request's seed: nothing else changes its ids."""
    requests = [ask(context, str(i), seed=i % 3) for i, context in enumerate(contexts)]
    shuffled = data.draw(st.permutations(requests))

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            tasks = {each.request_id: group.create_task(engine.generate(each)) for each in shuffled}
        return {name: task.result() for name, task in tasks.items()}

    together = serve(ScriptedEngine(), scenario)

    for request in requests:
        alone = answer(ScriptedEngine(), request)
        assert together[request.request_id].token_ids.tolist() == alone.token_ids.tolist()
        assert together[request.request_id].logprobs.tolist() == alone.logprobs.tolist()


def test_random_ids_are_the_same_on_every_machine():
    """A snapshot: benchmarks and recorded runs rely on it."""
    result = answer(ScriptedEngine(policy=RandomPolicy(seed=3)), ask(seed=1))

    assert result.token_ids.tolist() == [221, 247, 200, 209, 49, 225, 119, 184]


def test_seeds_matter_unless_greedy():
    """Other seeds give other ids; a greedy request has no use for its seed."""
    sampled = [answer(ScriptedEngine(), ask(seed=seed)).token_ids.tolist() for seed in (None, 0, 1)]
    greedy = [answer(ScriptedEngine(), ask(seed=seed, temperature=0)).token_ids.tolist() for seed in (None, 0, 1)]
    other = answer(ScriptedEngine(policy=RandomPolicy(seed=1)), ask()).token_ids.tolist()

    assert len({tuple(each) for each in [*sampled, other]}) == 4
    assert greedy == [sampled[0]] * 3


def test_turns_of_the_random_policy_have_the_mean_length():
    """The end token comes after `mean_tokens` on average, and ends the turn when it is a stop id."""
    policy = RandomPolicy(end_token_id=255, mean_tokens=10)

    async def scenario(engine):
        return [await engine.generate(ask([i], str(i), max_tokens=500, stop_token_ids=(255,))) for i in range(2000)]

    results = serve(ScriptedEngine(policy=policy), scenario)

    assert {result.stop_reason for result in results} == {255}
    # Other ids may be the end token by chance, once in 256, which shortens turns a little.
    assert 8.5 < np.mean([len(result.token_ids) for result in results]) < 10.5


def test_a_turn_cut_in_two_has_the_same_logprobs():
    """They depend on the place of a token alone; they are negative and finite, far into a context too."""
    whole = answer(ScriptedEngine(lambda _: range(40)), ask(max_tokens=40)).logprobs
    rest = answer(ScriptedEngine(lambda _: range(40)), ask(range(13), max_tokens=30)).logprobs
    long = answer(ScriptedEngine(lambda _: [1] * 20_000), ask(max_tokens=20_000)).logprobs

    assert whole[10:].tolist() == rest.tolist()
    assert long[:40].tolist() == whole.tolist()
    assert -2 <= long.min() <= long.max() < 0
    assert len(long) == 20_000


def test_abort_returns_what_the_schedule_had_reached():
    """After half a second of 0.1 s a token there are about four tokens, and the slot is free."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = await begin(group, engine, ask(max_tokens=100))
            await asyncio.sleep(0.25)
            await engine.abort("a")
        return task.result(), engine.stats()["num_running"]

    result, num_running = serve(ScriptedEngine(token_latency_s=0.05), scenario)

    whole = answer(ScriptedEngine(), ask(max_tokens=100)).token_ids.tolist()
    assert result.finish_reason is FinishReason.ABORT
    assert 1 <= len(result.token_ids) <= 50
    assert result.token_ids.tolist() == whole[: len(result.token_ids)]
    assert num_running == 0


def test_latency_may_depend_on_the_request():
    """Of two requests sent at once, the one with the shorter latency ends first."""
    engine = ScriptedEngine(
        latency_s=lambda request: 0.05 if request.request_id == "slow" else 0.0,
        token_latency_s=lambda _request, index: 0.001 * (index == 0),
    )
    order = []

    async def one(engine, name):
        await engine.generate(ask(request_id=name))
        order.append(name)

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            group.create_task(one(engine, "slow"))
            group.create_task(one(engine, "fast"))

    serve(engine, scenario)

    assert order == ["fast", "slow"]


def test_failures_by_number_and_by_request():
    """The nth call fails, or the calls that a function picks; the others are served."""

    async def scenario(engine):
        outcomes = []
        for name in ("a", "b", "c"):
            try:
                outcomes.append(len((await engine.generate(ask(request_id=name))).token_ids))
            except (EngineError, ValueError) as error:
                outcomes.append(type(error))
        return outcomes

    by_number = ScriptedEngine(failures={1: Failure.ERROR})
    by_request = ScriptedEngine(
        failures=lambda request: {"a": Failure.TOO_FEW_LOGPROBS, "c": Failure.TOO_MANY_LOGPROBS}.get(request.request_id)
    )

    assert serve(by_number, scenario) == [8, EngineError, 8]
    assert serve(by_request, scenario) == [ValueError, 8, ValueError]


def test_hanging_ends_with_an_abort():
    """A request that hangs never ends by itself, and is aborted like any other."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = await begin(group, engine, ask())
            await asyncio.sleep(0.01)
            hung = not task.done()
            await engine.abort("a")
        return hung, task.result().finish_reason

    assert serve(ScriptedEngine(failures={0: Failure.HANG}), scenario) == (True, FinishReason.ABORT)


def test_death_takes_everything_with_it():
    """The call, what is in flight and all later calls raise `ReplicaDiedError`."""

    async def raises(awaitable):
        with pytest.raises(ReplicaDiedError, match="the scripted engine died"):
            await awaitable
        return True

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            first = group.create_task(raises(engine.generate(ask(request_id="first"))))
            await in_flight(engine)
            await raises(engine.generate(ask(request_id="second")))
        return await first, await raises(engine.generate(ask())), await raises(engine.update_weights([], 1))

    assert serve(ScriptedEngine(latency_s=5, failures={1: Failure.DIE}), scenario) == (True, True, True)


def test_weights_change_in_mid_flight():
    """Each token has the version it met; one version for all is a number."""

    async def scenario(engine):
        await engine.update_weights([], 1)
        async with asyncio.TaskGroup() as group:
            task = await begin(group, engine, ask(max_tokens=20))
            await asyncio.sleep(0.1)
            await engine.update_weights([("w", np.zeros(1))], 2)
        return task.result(), await engine.generate(ask(max_tokens=1))

    mixed, later = serve(ScriptedEngine(token_latency_s=0.01), scenario)

    assert mixed.weight_version.tolist() == sorted(mixed.weight_version.tolist())
    assert set(mixed.weight_version.tolist()) == {1, 2}
    assert later.weight_version == 2


def test_what_came_in_is_recorded():
    """Requests and calls in order, or nothing when recording is off."""

    async def scenario(engine):
        await engine.generate(ask(request_id="x"))
        await engine.abort("x")
        await engine.sleep(1)
        await engine.wake_up(["weights"])
        await engine.update_weights([("w", np.zeros(1))], 3)
        await engine.wake_up(["kv_cache"])
        await engine.stop()
        return [each.request_id for each in engine.requests], engine.calls, engine.num_calls

    calls = [
        ("start",),
        ("abort", "x"),
        ("sleep", 1),
        ("wake_up", "weights"),
        ("update_weights", 3, "w"),
        ("wake_up", "kv_cache"),
        ("stop",),
    ]
    assert serve(ScriptedEngine(), scenario) == (["x"], calls, 1)
    assert serve(ScriptedEngine(record=False), scenario) == ([], [], 1)


def test_memory_is_taken_tag_by_tag():
    """It serves once both tags are awake, and after level 2 once the weights are there again."""

    async def served(engine):
        try:
            await engine.generate(ask())
        except EngineError as error:
            return str(error)
        return "served"

    async def scenario(engine):
        seen = []
        await engine.sleep(2)
        for step in (
            engine.wake_up(["weights"]),
            engine.wake_up(["kv_cache"]),
            engine.update_weights([], 1),
            engine.sleep(1),
            engine.wake_up(),
        ):
            await step
            seen.append(await served(engine))
        return seen

    half, dropped = "the scripted engine is asleep (level 2): wake up kv_cache", "the weights were dropped"
    asleep = "the scripted engine is asleep (level 1): wake up weights and kv_cache"
    assert serve(ScriptedEngine(), scenario) == [half, dropped, "served", asleep, "served"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.sleep(3), "no sleep level 3"),
        (lambda engine: engine.wake_up(["disk"]), "cannot wake up 'disk', only weights and kv_cache"),
        (lambda engine: engine.start(), "it is running"),
        (lambda engine: engine.generate(ask([])), "the context is empty"),
        (lambda engine: engine.generate(ask(range(30))), "the context has 30 tokens, but max_context is 16"),
        (lambda engine: engine.generate(ask(stop=("x",))), "no stop strings"),
    ],
)
def test_misuse_is_refused(call, message):
    """Each with a text that says what was wrong."""
    engine = ScriptedEngine(capabilities=Capabilities(abort=True, sleep_levels=frozenset({1}), max_context=16))

    with pytest.raises(EngineError, match=message):
        serve(engine, call)


def test_no_bound_at_all_is_refused():
    """Neither the request nor the engine says how long an output may be."""
    with pytest.raises(EngineError, match="the request has no max_tokens"):
        answer(ScriptedEngine(), ask(max_tokens=None))


def test_sleeping_ends_what_is_in_flight():
    """Requests in flight end with `abort` when the engine goes to sleep, and no weights go into memory that sleeps."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = await begin(group, engine, ask())
            with pytest.raises(EngineError, match="request 'a' is in flight already"):
                await engine.generate(ask())
            await engine.sleep(1)
        assert FinishReason.ABORT == task.result().finish_reason
        with pytest.raises(EngineError, match="the weights of the scripted engine are asleep"):
            await engine.update_weights([], 1)

    serve(ScriptedEngine(latency_s=5), scenario)


def test_an_output_may_be_empty():
    """A model that says nothing at all, at once or after a while."""
    at_once = answer(ScriptedEngine(lambda _: []), ask())
    later = answer(ScriptedEngine(lambda _: [], latency_s=0.001), ask())

    assert [len(at_once.token_ids), len(later.token_ids)] == [0, 0]
    assert (at_once.finish_reason, later.finish_reason) == (FinishReason.STOP, FinishReason.STOP)


def test_mean_tokens_of_one():
    """Turns of one token: the end token alone."""
    policy = RandomPolicy(end_token_id=9, mean_tokens=1)

    result = answer(ScriptedEngine(policy=policy), ask(stop_token_ids=(9,)))

    assert result.token_ids.tolist() == [9]
