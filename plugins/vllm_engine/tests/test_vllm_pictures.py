"""The real vLLM with a vision-language model: every token has the log-probability of one forward pass."""

import asyncio

import numpy as np
import pytest
from attrs import evolve

from turnwise.protocols import Resources
from turnwise.types import FinishReason, SamplingParams
from turnwise_testing.inputs.vision import draw_picture
from turnwise_vllm_engine import VllmConfig, VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PICTURES = [draw_picture(0), draw_picture(1), draw_picture(2, 100, 90), draw_picture(3, 40, 8, "JPEG")]
BLOCK = 32


@pytest.fixture(scope="module")
def runner():
    """The event loop of the shared engine."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["qwen3_vl", "internvl"])
def reference(request):
    """The forward pass of a tiny model: one with a grid of patches, and one with a stack of tiles."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def engine(reference, runner):
    """One engine for all tests, with small pages."""
    config = VllmConfig(
        model=reference.path,
        max_context=512,
        kv_cache_bytes=64 << 20,
        num_threads=1,
        engine_args={"block_size": BLOCK},
    )
    engine = VllmEngine(config, Resources())
    runner.run(engine.start())
    yield engine
    runner.run(engine.stop())


@pytest.fixture(scope="module")
def ask(reference):
    """A function that returns a request of ids and of numbers of pictures."""
    probe = reference.probe(PICTURES)

    def make(name, parts, **sampling):
        params = SamplingParams(**{"max_tokens": 6, "temperature": 1.0, "seed": len(name), **sampling})
        return probe.request(name, parts, params)

    return make


async def start_and_hear(engine, request, group):
    """Start a request, and wait for its first token."""
    heard = asyncio.Event()
    task = group.create_task(engine.generate(evolve(request, on_tokens=lambda _ids: heard.set())))
    await heard.wait()
    return task


def test_conversations_with_pictures_in_every_turn(engine, runner, ask, reference):
    """Three at once; each turn finds the full pages of the one before, pictures included."""

    async def converse(number):
        parts = [[50 + number] * 3]
        before = 0
        for turn in range(3):
            parts += [[60, 61], (number + turn) % 4, [62], turn % 2, [63]]
            request = ask(f"c{number}.{turn}", parts)
            result = await engine.generate(request)
            reference.expect_logprobs(request, result)
            assert result.num_cached_tokens >= before // BLOCK * BLOCK
            before = len(request.token_ids)
            parts.append(result.token_ids.tolist())

    async def scenario():
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(converse(number))

    runner.run(scenario())


def test_a_sampled_placeholder_is_text(engine, runner, ask, reference):
    """Before and behind a picture the id of a placeholder has no picture."""
    pad = reference.placeholder
    request = ask("sampled", [[50, pad, 51], 0, [52, pad, 53]])
    reference.expect_logprobs(request, runner.run(engine.generate(request)))


def test_an_aborted_request_keeps_its_tokens(engine, runner, ask, reference):
    """And the next request is served."""
    request = ask("aborted", [[50], 0, [51]], max_tokens=400)

    async def scenario():
        async with asyncio.TaskGroup() as group:
            task = await start_and_hear(engine, request, group)
            await engine.abort("aborted")
        return task.result()

    aborted = runner.run(scenario())
    assert aborted.finish_reason is FinishReason.ABORT
    assert len(aborted.token_ids)
    reference.expect_logprobs(request, aborted)
    later = ask("later", [[50], 0, [51]])
    reference.expect_logprobs(later, runner.run(engine.generate(later)))


def test_weights_change_between_two_tokens(engine, runner, ask, reference):
    """Tokens behind the update see the picture through the new vision tower too."""
    request = ask("updated", [[50], 0, [51], 2, [52]], max_tokens=300)

    async def scenario():
        async with asyncio.TaskGroup() as group:
            task = await start_and_hear(engine, request, group)
            await engine.update_weights(reference.weights(variant=1), 1)
        return task.result()

    try:
        result = runner.run(scenario())
        new = np.broadcast_to(result.weight_version, result.token_ids.shape) == 1
        assert not new.all()
        reference.expect_logprobs(request, result, part=~new)
        reference.expect_logprobs(request, result, variant=1, part=new)
        again = ask("again", [[50], 0, [51], 2, [52]])
        reference.expect_logprobs(again, runner.run(engine.generate(again)), variant=1)
    finally:
        runner.run(engine.update_weights(reference.weights(variant=0), 2))


@pytest.mark.parametrize("level", [1, 2])
def test_a_slept_engine_reads_the_picture_again(engine, runner, ask, reference, level):
    """After sleep, wake-up and an update, the same request has the log-probabilities of the new weights."""
    request = ask("slept", [[50], 0, [51], 2, [52] * 40])

    async def scenario():
        await engine.generate(request)
        await engine.sleep(level)
        await engine.wake_up()
        await engine.update_weights(reference.weights(variant=1), 3)
        return await engine.generate(request)

    try:
        result = runner.run(scenario())
        assert result.num_cached_tokens == 0
        reference.expect_logprobs(request, result, variant=1)
    finally:
        runner.run(engine.update_weights(reference.weights(variant=0), 4))
