"""Sleep, wake-up and updates that fail or are cancelled at any point leave the weights of one version, or of none."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from attrs import evolve

from turnwise.errors import AsleepError, TornWeightsError
from turnwise.layout import Layout
from turnwise.types import SamplingParams
from turnwise_testing.checks.engine.token_versions import expect_versions
from turnwise_testing.engines.scenarios import failure_of
from turnwise_testing.probes.engine import EngineProbe
from turnwise_transformers_engine.weights import memory_state
from turnwise_transformers_engine.weights import updates as weights
from turnwise_transformers_engine.weights.memory_state import MemoryState

MODULE = "model.layers.1.self_attn.q_proj"
ADAPTER = [
    (f"{MODULE}.lora_A.weight", np.ones((1, 32), np.float32)),
    (f"{MODULE}.lora_B.weight", np.ones((32, 1), np.float32)),
]


class Failing:
    """Raises at its first call, and then calls the function that it replaces."""

    def __init__(self, real):
        self.real, self.calls = real, 0

    def __call__(self, *args, **options):
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("no room")
        return self.real(*args, **options)


class Held(list):
    """Weights whose reader waits before the third one."""

    def __init__(self, pairs):
        super().__init__(pairs)
        self.read, self.go_on = threading.Event(), threading.Event()

    def __iter__(self):
        for number, pair in enumerate(super().__iter__()):
            if number == 2:
                self.read.set()
                assert self.go_on.wait(60)
            yield pair

    async def wait_until_read(self):
        while not self.read.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)


def fail_at(place, engine, monkeypatch):
    """Let the next update fail at a place after its first write."""
    memory, backend = engine._memory, engine._backend
    owner, name = {
        "the end of the writes": (weights, "finish_writes"),
        "the cache": (type(backend), "drop_keys_values"),
        "the names": (type(memory), "mark_loaded"),
    }[place]
    failing = Failing(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *args: failing(*args))


@pytest.mark.parametrize("place", ["the end of the writes", "the cache", "the names"])
@pytest.mark.parametrize("layout", [None, Layout()], ids=["plain", "layout"])
def test_an_update_that_fails_midway_serves_nothing(tiny_model, tiny_reference, serve, ask, monkeypatch, place, layout):
    """Requests in flight and later ones raise, and no token is sampled, until an update brings all weights."""
    whole = list(tiny_reference.weights(variant=2))

    async def scenario(engine):
        first = await engine.generate(ask("before"))
        heard = asyncio.Event()
        request = evolve(ask("in flight", max_tokens=200, seed=3), layout=layout, on_tokens=lambda _: heard.set())
        async with asyncio.TaskGroup() as group:
            running = group.create_task(failure_of(engine.generate(request), TornWeightsError))
            await heard.wait()
            fail_at(place, engine, monkeypatch)
            torn = await failure_of(engine.update_weights(tiny_reference.weights(variant=1), 1), TornWeightsError)
        failures = [running.result(), torn, await failure_of(engine.generate(ask()), TornWeightsError)]
        adapter = await failure_of(engine.update_weights(ADAPTER, 2))
        await engine.update_weights(whole[:3], 3)
        failures.append(await failure_of(engine.generate(ask()), TornWeightsError))
        await engine.update_weights(whole, 4)
        return first, {str(each) for each in failures}, str(adapter), await engine.generate(ask("after", seed=1))

    first, failures, adapter, after = serve(tiny_model, scenario)

    assert {"the weight update to version 1 failed midway: RuntimeError: no room"} == failures
    assert "send whole weights first" in adapter
    assert 0 == first.weight_version
    probe = EngineProbe(vocab_size=512, reference=tiny_reference, logprob_bound=1e-4)
    expect_versions(probe, [(ask("after"), after)], {4: 2})


@pytest.mark.parametrize(("level", "place"), [(1, "free_cache"), (2, "free_cache"), (2, "release_weights")])
def test_a_sleep_that_fails_midway_never_serves_freed_memory(
    tiny_model, tiny_reference, serve, ask, monkeypatch, level, place
):
    """The engine is asleep, wakes up, and serves its weights, or refuses until it has weights again."""

    async def scenario(engine):
        backend = type(engine._backend)
        failing = Failing(getattr(backend, place))
        monkeypatch.setattr(backend, place, lambda *args: failing(*args))
        await failure_of(engine.sleep(level))
        asleep = await failure_of(engine.generate(ask()), AsleepError)
        monkeypatch.setattr(backend, place, failing.real)
        await engine.wake_up()
        kept = not engine._memory.missing
        if not kept:
            await failure_of(engine.generate(ask()))
        answers = [(ask("a"), await engine.generate(ask("a", seed=1)))] if kept else []
        await engine.update_weights(tiny_reference.weights(variant=1), 1)
        answers.append((ask("b"), await engine.generate(ask("b", seed=1))))
        return asleep, answers

    asleep, answers = serve(tiny_model, scenario)

    assert "asleep" in str(asleep)
    probe = EngineProbe(vocab_size=512, reference=tiny_reference, logprob_bound=1e-4)
    expect_versions(probe, answers, {0: 0, 1: 1})


def test_memory_that_could_not_be_restored_is_restored_later(tiny_model, serve, ask, monkeypatch, assert_logprobs):
    """A second wake-up restores the memory that the first could not allocate, also of a GPU, which a CPU stands for."""
    monkeypatch.setattr(memory_state, "drops_weights", lambda _level: True)
    real = MemoryState._free_weights
    monkeypatch.setattr(MemoryState, "_free_weights", lambda self, *, backup: real(self, backup=True))

    async def scenario(engine):
        await engine.sleep(1)
        failing = Failing(torch.empty)
        monkeypatch.setattr(torch, "empty", failing)
        await failure_of(engine.wake_up())
        monkeypatch.setattr(torch, "empty", failing.real)
        await engine.wake_up()
        return await engine.generate(ask())

    assert_logprobs(serve(tiny_model, scenario), tiny_model)


def test_an_interrupted_update_of_adapters_keeps_newer_bases(tiny_model, tiny_reference, serve, monkeypatch):
    """W0 of a later adapter is from the last whole weights, not from the weights of the interrupted update."""
    whole = dict(tiny_reference.weights(variant=1))
    held = Held([None] * 3)

    async def scenario(engine):
        backend, waits = type(engine._backend), [held]
        real = backend.paused

        def paused(self):
            for each in waits.pop() if waits else ():
                assert each is None
            return real(self)

        monkeypatch.setattr(backend, "paused", paused)
        async with asyncio.TaskGroup() as group:
            cancelled = group.create_task(engine.update_weights(ADAPTER, 1))
            await held.wait_until_read()
            cancelled.cancel()
            newer = group.create_task(engine.update_weights(whole.items(), 2))
            await asyncio.wait((newer,), timeout=0.2)
            held.go_on.set()
        await asyncio.sleep(0.1)
        await engine.update_weights([(name, np.zeros_like(each)) for name, each in ADAPTER], 3)
        return engine._backend.model.state_dict()[f"{MODULE}.weight"].numpy().copy()

    np.testing.assert_array_equal(whole[f"{MODULE}.weight"], serve(tiny_model, scenario))


def test_layouts_around_updates(tiny_model, tiny_reference, serve, ask):
    """Requests with a layout continue while weights are read; each token comes from the weights that it claims."""
    probe = EngineProbe(vocab_size=512, reference=tiny_reference, logprob_bound=1e-4)
    sampling = SamplingParams(temperature=1.0, max_tokens=60)

    async def scenario(engine):
        answers, stop = [], asyncio.Event()

        async def keep_asking():
            while not stop.is_set():
                request = evolve(probe.request(sampling=sampling), layout=Layout())
                answers.append((request, await engine.generate(request)))

        async with asyncio.TaskGroup() as group:
            group.create_task(keep_asking())
            for version in (1, 2, 3):
                held = Held(tiny_reference.weights(variant=version))
                update = group.create_task(engine.update_weights(held, version))
                await held.wait_until_read()
                num_before = len(answers)
                while len(answers) == num_before:  # noqa: ASYNC110 - an engine has no event for it
                    await asyncio.sleep(0.001)
                if version == 2:
                    update.cancel()
                held.go_on.set()
                await asyncio.wait((update,))
            stop.set()
        return answers

    answers = serve(tiny_model, scenario)

    expect_versions(probe, answers, {version: version for version in range(4)})
    assert {0, 1, 3} <= {int(each) for _, result in answers for each in np.atleast_1d(result.weight_version)}


def test_a_wrong_version_is_explained(tiny_reference, tiny_model, serve, ask):
    """The text has the token, its claimed version, and its distances from this version and its neighbours."""
    probe = EngineProbe(vocab_size=512, reference=tiny_reference, logprob_bound=1e-4)

    async def scenario(engine):
        await engine.update_weights(tiny_reference.weights(variant=1), 1)
        return await engine.generate(ask("a", seed=1))

    result = evolve(serve(tiny_model, scenario), weight_version=0)

    text = r"^token 0 of 16 of request 'a', id \d+, claims weight version 0; its log-probability is off by"
    with pytest.raises(AssertionError, match=rf"{text} \S+ under version 0, \S+ under version 1 nats, and at most"):
        expect_versions(probe, [(ask("a"), result)], {0: 0, 1: 1})
