"""The real SGLang with a vision-language model: every token has the log-probability of one forward pass."""

import asyncio
import threading

import numpy as np
import pytest
from attrs import evolve

from turnwise.protocols import Resources
from turnwise.types import FinishReason, SamplingParams
from turnwise_sglang_engine import SglangConfig, SglangEngine
from turnwise_testing.inputs.vision import draw_picture

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.usefixtures("starts_a_process")]

SIZES = [(56, 84), (56, 84), (150, 120), (28, 30)]
PICTURES = [draw_picture(number, *size) for number, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def runner():
    """The event loop of the shared engine."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(qwen2_5_vl, runner):
    """One engine for all tests. It prefills in chunks that are shorter than a picture."""
    config = SglangConfig(
        model=qwen2_5_vl.path,
        device="cpu",
        max_context=512,
        num_threads=1,
        weight_bucket_bytes=100_000,
        engine_args={"chunked_prefill_size": 16},
    )
    engine = SglangEngine(config, Resources())
    runner.run(engine.start())
    yield engine
    runner.run(engine.stop())


@pytest.fixture(scope="module")
def ask(qwen2_5_vl):
    """A function that returns a request of ids and of numbers of pictures."""
    probe = qwen2_5_vl.probe(PICTURES)

    def make(name, parts, **sampling):
        return probe.request(name, parts, SamplingParams(**{"max_tokens": 6, "temperature": 1.0, **sampling}))

    return make


async def start_and_hear(engine, request, group):
    """Start a request, and wait for its first token."""
    heard = asyncio.Event()
    task = group.create_task(engine.generate(evolve(request, on_tokens=lambda _ids: heard.set())))
    await heard.wait()
    return task


def test_conversations_with_pictures_in_every_turn(engine, runner, ask, qwen2_5_vl):
    """Three at once; each turn finds all tokens of the one before in the cache, pictures included."""

    async def converse(number):
        parts = [[50 + number] * 3]
        before = 0
        for turn in range(3):
            parts += [[60, 61], (number + turn) % 4, [62], turn % 2, [63]]
            request = ask(f"c{number}.{turn}", parts)
            result = await engine.generate(request)
            qwen2_5_vl.expect_logprobs(request, result)
            assert result.num_cached_tokens >= before
            before = len(request.token_ids)
            parts.append(result.token_ids.tolist())

    async def scenario():
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(converse(number))

    runner.run(scenario())


def test_a_sampled_placeholder_is_text(engine, runner, ask, qwen2_5_vl):
    """Before and behind a picture the id of a placeholder has no picture."""
    pad = qwen2_5_vl.placeholder
    request = ask("sampled", [[50, pad, 51], 0, [52, pad, 53]])
    qwen2_5_vl.expect_logprobs(request, runner.run(engine.generate(request)))


def test_the_same_ids_behind_another_picture_are_not_cached(engine, runner, ask, qwen2_5_vl):
    """The prefix cache has the key of a picture in place of its placeholders."""
    first, second = (ask(f"other{number}", [[70, 71], number, [72] * 20]) for number in range(2))
    assert first.token_ids.tolist() == second.token_ids.tolist()

    qwen2_5_vl.expect_logprobs(first, runner.run(engine.generate(first)))
    result = runner.run(engine.generate(second))

    qwen2_5_vl.expect_logprobs(second, result)
    assert result.num_cached_tokens == 2


def test_an_aborted_request_keeps_its_tokens(engine, runner, ask, qwen2_5_vl):
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
    qwen2_5_vl.expect_logprobs(request, aborted)
    later = ask("later", [[50], 0, [51]])
    qwen2_5_vl.expect_logprobs(later, runner.run(engine.generate(later)))


@pytest.mark.parametrize("parts", [[[50], 0, [51], 2, [52]], [[50], 2]], ids=["text", "picture"])
def test_weights_change_between_two_tokens(engine, runner, ask, qwen2_5_vl, parts):
    """Tokens behind the update see the picture through the new vision tower too, also if it ends the context."""
    heard = threading.Event()
    request = evolve(ask("updated", parts, max_tokens=400), on_tokens=lambda _ids: heard.set())
    *first, last = qwen2_5_vl.weights(variant=1)

    def weights():
        """Yield all but the last one early, so that little remains to be done at the first token."""
        yield from first
        heard.wait()
        yield last

    async def scenario():
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.update_weights(weights(), 1))
            task = group.create_task(engine.generate(request))
        return task.result()

    try:
        result = runner.run(scenario())
        new = np.broadcast_to(result.weight_version, result.token_ids.shape) == 1
        assert not new.all()
        assert new.any()
        qwen2_5_vl.expect_logprobs(request, result, part=~new)
        qwen2_5_vl.expect_logprobs(request, result, variant=1, part=new)
        again = ask("again", parts)
        qwen2_5_vl.expect_logprobs(again, runner.run(engine.generate(again)), variant=1)
    finally:
        runner.run(engine.update_weights(qwen2_5_vl.weights(variant=0), 2))


def test_only_the_vision_tower_changes(engine, runner, ask, qwen2_5_vl):
    """SGLang keeps no features of a picture that a former tower has computed."""
    import torch

    reference = qwen2_5_vl.model(variant=0)
    request = ask("seen", [[50], 0, [51]])
    runner.run(engine.generate(request))
    old = {name: weight.clone() for name, weight in reference.state_dict().items() if "visual" in name}
    new = {name: weight + 0.1 * torch.randn(weight.shape) for name, weight in old.items()}
    try:
        for weights, version in ((new, 3), (old, 4)):
            runner.run(engine.update_weights(weights.items(), version))
            reference.load_state_dict(weights, strict=False)
            qwen2_5_vl.expect_logprobs(request, runner.run(engine.generate(request)))
    finally:
        reference.load_state_dict(old, strict=False)
