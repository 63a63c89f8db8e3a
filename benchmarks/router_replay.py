"""
Measures how far a trainer is from its engine for a mixture of experts, with its own routes and with the engine's.

    python benchmarks/router_replay.py
    python benchmarks/router_replay.py --model models/mixture --tokens 64

The engine samples in bfloat16. The trainer computes the same tokens in float32, with routers as they are, or perturbed
by noise of a share of the standard deviation of their weights. Differences are those of the log-probability of a token.
Without `--model` the mixture has random weights: 4 layers with 32 experts, 4 of them for a token. Trained routers are
more decided.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measurement import describe_machine
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from turnwise.protocols import Resources
from turnwise.types import GenerateRequest, GenerateResult, SamplingParams
from turnwise_moe_routes.forcing import RouteForcer
from turnwise_moe_routes.layers import find_expert_layers
from turnwise_moe_routes.recording import RouteRecorder
from turnwise_moe_routes.shapes import COLUMN, RouteShape, read_shape
from turnwise_testing.references.reference_model import mixture_config, randomize_matrices
from turnwise_transformers_engine import TransformersConfig, TransformersEngine

Sampled = Sequence[tuple[NDArray[np.int32], GenerateResult]]


def make_model(folder: Path) -> Path:
    """Write a random mixture of experts whose distributions are far from uniform."""
    torch.manual_seed(0)
    config = mixture_config(
        1000,
        hidden_size=128,
        num_hidden_layers=4,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
    )
    # transformers leaves the constructor without types
    model = randomize_matrices(Qwen3MoeForCausalLM(config), 0.1, {"lm_head": 0.05})  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


async def sample(path: Path, options: argparse.Namespace, vocabulary: int) -> Sampled:
    """Return contexts and what the engine sampled after them, with routes."""
    config = TransformersConfig(
        model=path, device="cpu", dtype="bfloat16", max_context=512, seed=0, enable_return_routed_experts=True
    )
    engine = TransformersEngine(config, Resources())
    await engine.start()
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, vocabulary, 16, dtype=np.int32) for _ in range(options.requests)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    engine.generate(
                        GenerateRequest(
                            request_id=str(number),
                            trajectory_id=str(number),
                            token_ids=context,
                            sampling=SamplingParams(max_tokens=options.tokens),
                        )
                    )
                )
                for number, context in enumerate(contexts)
            ]
    finally:
        await engine.stop()
    return [(context, task.result()) for context, task in zip(contexts, tasks, strict=True)]


def compare(model: Any, shape: RouteShape, sampled: Sampled, *, replay: bool) -> tuple[NDArray[Any], float]:
    """Return the differences of all sampled tokens, and the share of tokens with another expert in some layer."""
    forcer, recorder = RouteForcer(model, shape), RouteRecorder(shape)
    handles, gaps, moved = recorder.attach(model), [], []
    for context, result in sampled:
        ids = torch.from_numpy(np.concatenate([context, result.token_ids]).astype(np.int64))
        engine = np.asarray((result.columns or {})[COLUMN])
        given = torch.from_numpy(engine)[None] if replay else torch.from_numpy(shape.unknown(len(ids)))[None]
        with torch.no_grad(), recorder.recording() as found, forcer.forcing(given):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        own = logits.log_softmax(-1)[len(context) - 1 : -1].gather(-1, ids[len(context) :, None])[:, 0]
        gaps.append(own.numpy() - result.logprobs)
        moved.append((np.sort(found.routes()) != np.sort(engine))[:-1].any((1, 2)))
    for handle in handles:
        handle.remove()
    return np.concatenate(gaps), float(np.concatenate(moved).mean())


def perturbed(model: Any, noise: float) -> Any:
    """Return a copy whose routers have noise of a share of the standard deviation of their weights."""
    changed, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in find_expert_layers(changed):
            for name, weight in layer.block.named_parameters():
                if "expert" not in name and weight.ndim == 2:
                    weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return changed


def run(path: Path, options: argparse.Namespace) -> None:
    """Print the table."""
    shape = read_shape(path)
    assert shape is not None, f"{path} is no mixture of experts"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    sampled = asyncio.run(sample(path, options, int(model.config.vocab_size)))
    print(f"{describe_machine()}; {shape}; {sum(len(result.token_ids) for _, result in sampled)} tokens\n")
    print("| noise of the routers | replay | tokens with another expert | mean difference | 99 % | largest | KL (k3) |")
    print("|---|---|---|---|---|---|---|")
    for noise in options.noise:
        trainer = perturbed(model, noise)
        for replay in (False, True):
            gaps, moved = compare(trainer, shape, sampled, replay=replay)
            size, divergence = np.abs(gaps), np.mean(np.exp(gaps) - 1 - gaps)
            print(
                f"| {noise:g} | {'yes' if replay else 'no'} | {moved:.1%} | {size.mean():.4f}"
                f" | {np.quantile(size, 0.99):.3f} | {size.max():.3f} | {divergence:.5f} |"
            )


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a mixture of experts; a random one is made without it")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="sampled by each request")
    parser.add_argument("--noise", type=float, nargs="+", default=[0, 0.01, 0.05])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model is not None:
        run(options.model, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(make_model(Path(folder)), options)


if __name__ == "__main__":
    main()
