"""
Compare forward and backward pass of the trainer with bare matrix products of the same shapes.

    python benchmarks/update_speed.py MODEL --tokens 170 340 680

MODEL is a folder of a causal model. Each line has the processor seconds of one micro-batch with so many tokens, and of
the products alone: of each linear module one in the forward pass and two in the backward pass, and of the output head
one more if its logits are computed in chunks, and so again. The difference is attention, norms, activations, the loss,
and the gradient of the embedding. Ratios hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measurement import describe_machine

from turnwise.protocols import ModelSpec
from turnwise_grpo_trainer.config import PolicyConfig
from turnwise_grpo_trainer.learner.batch_sizes import BatchSizes
from turnwise_grpo_trainer.learner.log_probs import token_log_probs
from turnwise_grpo_trainer.learner.micro_batches import MicroBatch
from turnwise_grpo_trainer.learner.models import load_policy

Shape = tuple[int, int, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a causal model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[170, 340], help="tokens of a micro-batch, in one row")
    parser.add_argument("--repeat", type=int, default=3, help="measurements, whose median counts")
    arguments = parser.parse_args()
    config = PolicyConfig(device="cpu")
    model = load_policy(config, ModelSpec(path=arguments.model))
    chunk = BatchSizes.choose(config, model, torch.device("cpu")).logits_chunk
    print(describe_machine())
    print(f"{'tokens':>7} {'trainer s':>10} {'products s':>11} {'ratio':>6} {'GFLOP/s of the products':>24}")
    for count in arguments.tokens:
        micro = make_micro(count)
        shapes = find_shapes(model, micro, chunk)
        operands = make_operands(shapes)

        def train(micro: MicroBatch = micro) -> None:
            log_probs, _ = token_log_probs(model, micro, 1.0, entropy="value", chunk=chunk)
            torch.autograd.backward(log_probs.sum())

        def multiply(operands: list[tuple[Any, Any]] = operands) -> None:
            for left, right in operands:
                left @ right

        pairs = [(cpu_seconds(train), cpu_seconds(multiply)) for _ in range(arguments.repeat)]
        trained, multiplied = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        flops = sum(2 * a * b * c for a, b, c in shapes) / multiplied / 1e9
        print(f"{count:7} {trained:10.2f} {multiplied:11.2f} {ratio:6.2f} {flops:24.1f}")


def make_micro(count: int) -> MicroBatch:
    """Return a micro-batch of one row in which each token predicts the next."""
    ids, zeros = torch.randint(100, (1, count)), torch.zeros(1, count, dtype=torch.int64)
    keep = torch.arange(count - 1)
    predictors = torch.stack([torch.zeros_like(keep), keep])
    positions = torch.arange(count)[None]
    return MicroBatch(
        ids, positions, zeros, zeros, zeros, keep, predictors, ids[0, 1:], keep, packed=False, has_blocks=False
    )


def find_shapes(model: Any, micro: MicroBatch, chunk: int | None) -> list[Shape]:
    """Return the shapes of all products of a forward and backward pass with logits in chunks."""
    shapes: list[Shape] = []
    head = model.get_output_embeddings()

    def note(module: Any, inputs: tuple[Any, ...], _output: Any) -> None:
        rows, (outs, ins) = inputs[0].numel() // inputs[0].shape[-1], module.weight.shape
        shapes.extend([(rows, ins, outs), (rows, outs, ins), (outs, rows, ins)])
        if module is head and chunk is not None and rows > chunk:
            shapes.append((rows, ins, outs))

    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_hook(note) for module in linear]
    with torch.no_grad():
        model(input_ids=micro.input_ids[:, :-1], use_cache=False)
    for hook in hooks:
        hook.remove()
    return shapes


def make_operands(shapes: list[Shape]) -> list[tuple[Any, Any]]:
    """Return matrices of the shapes; equal shapes share theirs."""
    made = {(a, b, c): (torch.rand(a, b), torch.rand(b, c)) for a, b, c in shapes}
    return [made[shape] for shape in shapes]


def cpu_seconds(function: Callable[[], None]) -> float:
    """Return the processor seconds of a call."""
    started = time.process_time()
    function()
    return time.process_time() - started


if __name__ == "__main__":
    main()
