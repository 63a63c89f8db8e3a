"""
Scenarios around an engine, and the expected log-probabilities by a plain forward pass, for tests of engine plugins.

torch and transformers are imported by the functions that need them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import ArrayLike, NDArray

from turnwise.errors import EngineError, TurnwiseError
from turnwise.protocols import Engine
from turnwise.types import GenerateRequest, GenerateResult, SamplingParams
from turnwise_testing.references.reference_model import save_random_model

T = TypeVar("T")

VOCAB_SIZE: Final = 512
"""Number of ids of the fakes and tiny models in the tests of engine plugins."""
CONTEXT: Final = tuple(11 * i % VOCAB_SIZE for i in range(3, 40))
"""37 ids: two full pages of 16 tokens, and part of a third."""


def skip_without_package(items: Iterable[pytest.Item], marker: str, package: str, reason: str) -> None:
    """Skip the tests with a marker if a package is not installed."""
    if find_spec(package) is None:
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def simple_request(
    request_id: str = "a", token_ids: ArrayLike = CONTEXT, trajectory_id: str = "t", **sampling: Any
) -> GenerateRequest:
    """Return a request for 16 tokens, unless `max_tokens` differs."""
    params = SamplingParams(**{"max_tokens": 16, **sampling})
    return GenerateRequest(
        request_id=request_id, trajectory_id=trajectory_id, token_ids=np.asarray(token_ids), sampling=params
    )


def run_scenario(engine: Engine, scenario: Callable[[Any], Awaitable[T]], timeout_s: float = 60.0) -> T:
    """Start an engine, return the result of `scenario(engine)`, and stop the engine even if the scenario fails."""

    async def run() -> T:
        await engine.start()
        try:
            async with asyncio.timeout(timeout_s):
                return await scenario(engine)
        finally:
            await engine.stop()

    return asyncio.run(run())


async def generate_together(engine: Engine, requests: Iterable[GenerateRequest]) -> list[GenerateResult]:
    """Send requests at the same time, and return their results in order."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(request)) for request in requests]
    return [task.result() for task in tasks]


async def abort_when_heard(engine: Engine, request: GenerateRequest) -> tuple[list[int], GenerateResult]:
    """Listen to a request, abort it at the first ids, and return all ids that the listener heard, and the result."""
    heard: list[int] = []
    has_heard = asyncio.Event()

    def listen(token_ids: Sequence[int]) -> None:
        heard.extend(token_ids)
        has_heard.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(engine.generate(evolve(request, on_tokens=listen)))
        await has_heard.wait()
        await engine.abort(request.request_id)
    return heard, task.result()


async def failure_of(awaitable: Awaitable[object], kind: type[TurnwiseError] = EngineError) -> TurnwiseError:
    """Return the error that awaiting raises; its text must be one line."""
    with pytest.raises(kind) as caught:
        await awaitable
    assert "\n" not in str(caught.value)
    return caught.value


def save_small_qwen3(directory: Path, tokenizer_dir: Path, vocab_size: int) -> Path:
    """
    Write a tied Qwen3 of two layers with random, sharpened weights, and return its directory.

    Args:
        directory: to write to.
        tokenizer_dir: directory to copy the tokenizer's files from.
        vocab_size: number of ids of the model.
    """
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    save_random_model(config, directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_dir / name, directory)
    return directory


def forward_logprobs(
    model: Any, request: GenerateRequest, token_ids: Sequence[int] | NDArray[Any], *, joint_filters: bool = False
) -> NDArray[np.float64]:
    """
    Return (n,) log-probabilities of sampled ids after temperature, top-k and top-p.

    Args:
        model: a causal model of transformers.
        request: its context and sampling parameters.
        token_ids: (n,) sampled ids.
        joint_filters: whether top-p looks at all ids, as in SGLang. In vLLM it looks at the ids that top-k leaves.
    """
    import torch

    sampling = request.sampling
    row = torch.tensor([[*request.token_ids, *token_ids]])
    with torch.no_grad():
        logits = model(row).logits[0, len(request.token_ids) - 1 : -1].double() / sampling.temperature
    if sampling.top_k != -1 and not joint_filters:
        logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    values, order = logits.softmax(-1).sort(descending=True)
    before = values.cumsum(-1) - values
    outside = before > sampling.top_p if joint_filters else before >= sampling.top_p
    if sampling.top_k != -1 and joint_filters:
        outside[:, sampling.top_k :] = True
    logits[torch.zeros_like(outside).scatter(-1, order, outside)] = -torch.inf
    sampled = row[0, len(request.token_ids) :, None]
    logprobs: NDArray[np.float64] = logits.log_softmax(-1).gather(-1, sampled)[:, 0].numpy()
    return logprobs
