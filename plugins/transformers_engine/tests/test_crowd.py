"""Aborts, cancels and updates at once: no request is lost, and every token agrees with its weight version."""

import asyncio

import numpy as np
import pytest
import torch
import transformers

NUM_WORKERS = 16


async def disturb(engine, task, request, number):
    """Cancel one request in five and abort another, soon after it was sent."""
    await asyncio.sleep(0.001 * (number % 20))
    if number % 5 == 0:
        task.cancel()
    elif number % 5 == 1:
        await engine.abort(request.request_id)


async def work(engine, requests, done):
    for number, request in enumerate(requests):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(request))
            await disturb(engine, task, request, number)
        if not task.cancelled():
            done.append((request, task.result()))


async def crowd(engine, requests, updates, left_over):
    """Run all workers with a weight update five times a second, and return the results."""
    done, version = [], 0
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work(engine, each, done)) for each in requests]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.2)
            version += 1
            await engine.update_weights(updates[version % 2], version)
    return done, engine.stats()["num_running"], left_over(engine)


@pytest.mark.parametrize("num_turns", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_no_request_is_lost(
    num_turns, tiny_model, other_model, other_weights, serve, ask, context, assert_logprobs, left_over
):
    """With a cache that is far too small, every request ends with correct log-probabilities."""
    first_model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    first_weights = [(name, weight.detach().numpy()) for name, weight in first_model.named_parameters()]
    requests = [
        [ask(f"worker-{i}", context[: 5 + (i + 7 * j) % 30], max_tokens=1 + 7 * (i + j) % 60) for j in range(num_turns)]
        for i in range(NUM_WORKERS)
    ]

    done, num_running, handlers = serve(
        tiny_model,
        lambda engine: crowd(engine, requests, [first_weights, other_weights], left_over),
        num_blocks=12,
        max_context=96,
    )

    assert (num_running, handlers) == (0, {})
    assert len(done) >= NUM_WORKERS * num_turns / 2
    for request, result in done[::5]:
        versions = np.broadcast_to(result.weight_version, result.token_ids.shape)
        assert_logprobs(result, first_model, request.token_ids, part=versions % 2 == 0)
        assert_logprobs(result, other_model, request.token_ids, part=versions % 2 == 1)
