"""The embedded engine: log-probabilities of the trainer's forward pass, blocks, prefix cache, weights and sleep."""

import asyncio

import numpy as np
import pytest
import torch
from gpu_support import VOCABULARY, load_policy, make_engine, report, small

from turnwise import Trajectory
from turnwise.types import GenerateRequest, SamplingParams
from turnwise.weights.sources import source_of
from turnwise_testing.engines.scenarios import generate_together, run_scenario, simple_request
from turnwise_testing.references.dense import token_logprobs

LARGEST_GAP = {"float32": 2e-3, "bfloat16": 1.0}
MEAN_GAP = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of log-probabilities between the engine and the trainer, in nats."""


def requests(number, length=40, **sampling):
    """Return requests with random contexts of different lengths."""
    random = np.random.default_rng(0)
    return [
        simple_request(str(each), random.integers(0, VOCABULARY, length + each), **{"max_tokens": 24, **sampling})
        for each in range(number)
    ]


def gaps(target, model, dtype, records):
    """Return the differences between the recorded log-probabilities and a forward pass of the trainer's model."""
    policy = load_policy(target, model, dtype)
    found = []
    for record in records:
        sampled = np.concatenate([np.zeros(len(record.prompt_ids), bool), record.response_mask.astype(bool)])
        recorded = record.logprobs[-len(sampled) :][record.response_mask.astype(bool)[-len(record.logprobs) :]]
        found.append(np.abs(token_logprobs(policy, record)[sampled] - recorded))
    return np.concatenate(found)


def check_gaps(target, text, found, dtype):
    """Compare with the limits, and report."""
    report(target, f"{text}, {dtype}: log-probability gap {found.mean():.1e} on average, at most {found.max():.1e}")
    assert len(found)
    assert found.mean() < MEAN_GAP[dtype]
    assert found.max() < LARGEST_GAP[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decoder", ["auto", "generic"])
@small
def test_log_probabilities_are_the_trainers(target, tiny_model, dtype, decoder):
    """Requests that are decoded together have the log-probabilities of a forward pass on each record."""
    asked = requests(target.pick(small=3, cpu=8, cuda=64))
    engine = make_engine(target, tiny_model, dtype=dtype, decoder=decoder)
    results = run_scenario(engine, lambda engine: generate_together(engine, asked))

    records = []
    for request, result in zip(asked, results, strict=True):
        assert len(result.token_ids) == 24
        records.append(Trajectory(request.token_ids))
        records[-1].add_action(result.token_ids, result.logprobs)
    check_gaps(target, f"decoder {decoder}, {len(asked)} requests", gaps(target, tiny_model, dtype, records), dtype)


async def continue_record(engine, record, max_tokens):
    """Sample after a record under its layout, and return the ids and log-probabilities."""
    request = GenerateRequest(
        request_id=f"{id(record)}-{len(record.input_ids)}",
        trajectory_id="t",
        token_ids=record.input_ids,
        sampling=SamplingParams(max_tokens=max_tokens),
        layout=record.layout,
    )
    result = await engine.generate(request)
    record.add_action(result.token_ids, result.logprobs)


async def play_block(engine):
    """Return a record with text, three paths that are sampled together, and text after them."""
    record = Trajectory(np.arange(3, 30))
    await continue_record(engine, record, 6)
    paths = record.fork(3)
    async with asyncio.TaskGroup() as group:
        for size, path in enumerate(paths, 3):
            path.add_forced([size])
            group.create_task(continue_record(engine, path, 3 * size))
    record.join(paths)
    record.add_forced([4, 5])
    await continue_record(engine, record, 8)
    return record


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@small
def test_blocks_have_the_log_probabilities_of_their_layout(target, tiny_model, dtype):
    """Paths that are decoded together, and the text after them, match a forward pass with the layout's mask."""
    record = run_scenario(make_engine(target, tiny_model, dtype=dtype), play_block)

    check_gaps(target, "a block of three paths", gaps(target, tiny_model, dtype, [record]), dtype)


@small
def test_the_prefix_cache_changes_no_token(target, tiny_model):
    """A second request with the same context finds its pages, and continues with the same ids."""
    first, again = (simple_request(name, np.arange(3, 103), max_tokens=12, temperature=0.0) for name in "ab")

    async def scenario(engine):
        return await engine.generate(first), await engine.generate(again)

    for decoder in target.pick(small=("auto",), cpu=("auto", "generic"), cuda=("auto",)):
        one, two = run_scenario(make_engine(target, tiny_model, dtype="float32", decoder=decoder), scenario)
        assert (one.num_cached_tokens, two.num_cached_tokens) == (0, 96)
        assert one.token_ids.tolist() == two.token_ids.tolist()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_returns_memory_to_the_driver(target, random_model, level):
    """After waking up, with new weights from the device after level 2, the same ids come."""
    greedy = requests(4, temperature=0.0)
    policy = load_policy(target, random_model)
    weights = sum(each.nbytes for each in policy.parameters())
    blocks = target.pick(small=64, cpu=256, cuda=2048)
    cache = blocks * 16 * 2 * 4 * 1024 * 4  # tokens of a page, keys and values, layers, width, bytes of float32

    async def scenario(engine):
        before = [each.token_ids.tolist() for each in await generate_together(engine, greedy)]
        with target.freed() as asleep:
            await engine.sleep(level)
        with target.freed() as awake:
            await engine.wake_up()
            if level == 2:
                await engine.update_weights(source_of(policy), 1)
        return before, asleep, awake, [each.token_ids.tolist() for each in await generate_together(engine, greedy)]

    engine = make_engine(target, random_model, dtype="float32", num_blocks=blocks)
    before, asleep, awake, after = run_scenario(engine, scenario)
    expected = f"weights {weights / 2**20:.0f} MiB, cache {cache / 2**20:.0f} MiB"
    report(target, f"sleep level {level}: {asleep}; wake up: {awake}; {expected}")
    assert before == after
    if target.is_cuda:
        assert asleep.num_bytes > 0.95 * (weights + cache)
        assert abs(asleep.num_bytes + awake.num_bytes) < 0.1 * asleep.num_bytes


@small
def test_an_update_from_the_device_changes_the_samples(target, tiny_model):
    """Weights that are tensors on the device are loaded, and requests use them."""
    (request,) = requests(1, temperature=0.0)
    changed = load_policy(target, tiny_model)
    changed.get_output_embeddings().weight.data.mul_(-1)

    async def scenario(engine):
        before = await engine.generate(request)
        await engine.update_weights(source_of(changed), 7)
        return before, await engine.generate(request)

    before, after = run_scenario(make_engine(target, tiny_model, dtype="float32"), scenario)
    assert before.token_ids.tolist() != after.token_ids.tolist()
    assert after.weight_version == 7
    with torch.no_grad():
        logits = changed(torch.tensor([request.token_ids.tolist()], device=target.name)).logits[0, -1]
    assert after.token_ids[0] == int(logits.argmax())
