"""
Measures the gap between plain causal sampling and the trained layout of parallel paths, by kind of segment.

Runs `examples/parallel_thinking.yaml` with the embedded engine. Compares each sampled token's log-probability with a
forward pass under the layout; they should be equal. Also compares the distribution of a plain causal engine on the same
text with the layout's distribution: KL(plain || layout) in nats.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from turnwise import RolloutManager
from turnwise.config.file import load_config
from turnwise.record.columns import Origin
from turnwise.record.trajectory import Trajectory
from turnwise_task_files import load_tasks
from turnwise_testing.references.dense import predecessors, token_logprobs, visibility

EXAMPLE = Path(__file__).parent.parent / "examples/parallel_thinking.yaml"
KINDS = ("main text", "paths, first block", "paths, later blocks", "summary", "text after a block")


def classify_segments(trajectory: Trajectory) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, start, stop) of every sampled segment."""
    summed_up = True
    for segment in trajectory.segments:
        if segment.block >= 0:
            summed_up = False
        if segment.origin is not Origin.ACTION:
            continue
        if segment.block >= 0:
            kind = KINDS[1] if segment.block == 0 else KINDS[2]
        elif not summed_up:
            kind, summed_up = KINDS[3], True
        else:
            kind = KINDS[4] if any(s.block >= 0 and s.start < segment.start for s in trajectory.segments) else KINDS[0]
        yield kind, segment.start, segment.stop


@torch.no_grad()
def distributions(model: Any, trajectory: Trajectory, *, plain: bool) -> torch.Tensor:
    """Return (T, V) float64 log-probabilities of the next token at each position."""
    size = len(trajectory)
    positions = np.arange(size) if plain else trajectory.position_ids
    seen = np.tril(np.ones((size, size), bool)) if plain else visibility(trajectory)
    mask = torch.zeros(1, 1, size, size).masked_fill_(~torch.from_numpy(seen), torch.finfo(torch.float32).min)
    logits = model(
        input_ids=torch.tensor(trajectory.input_ids[None].astype(np.int64)),
        position_ids=torch.tensor(positions[None].astype(np.int64)),
        attention_mask=mask,
        use_cache=False,
    ).logits[0]
    before = np.arange(size) - 1 if plain else predecessors(trajectory)
    return logits[before].double().log_softmax(-1)


def plain_paths(model: Any, trajectory: Trajectory) -> torch.Tensor:
    """Return (T, V) log-probabilities of a plain causal engine: a path sees only the text before its fork."""
    result = distributions(model, trajectory, plain=True)
    for block, start, stop in trajectory.layout.paths:
        if start == block:
            continue
        kept = np.r_[0:block, start:stop]
        ids = torch.tensor(trajectory.input_ids[kept][None].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        result[start:stop] = logits[block - 1 : -1].double().log_softmax(-1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=16, help="tasks to run (default: 16)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(EXAMPLE, [f"data.limit={options.tasks}", "rollout.n=2"])
    with RolloutManager.from_config(config) as manager:
        results = manager.rollout(load_tasks(config))
    model = AutoModelForCausalLM.from_pretrained(config.model_spec().path, dtype=torch.float32).eval()
    gaps, errors = defaultdict(list), defaultdict(list)
    for trajectory in (t for result in results for t in result.trajectories):
        exact, plain = distributions(model, trajectory, plain=False), plain_paths(model, trajectory)
        divergence = (plain.exp() * (plain - exact)).sum(-1).clamp(min=0).numpy()
        expected = token_logprobs(model, trajectory)
        for kind, start, stop in classify_segments(trajectory):
            own = slice(start - trajectory.num_prompt_tokens, stop - trajectory.num_prompt_tokens)
            gaps[kind].append(divergence[start:stop])
            errors[kind].append(np.abs(trajectory.logprobs[own] - expected[start:stop]))
    print(f"{len(results)} episodes, temperature 1, float32; KL(plain causal || layout) in nats")
    print(f"{'segment':22s} {'tokens':>7s} {'mean KL':>9s} {'max KL':>9s} {'|sampled - layout|':>19s}")
    for kind in KINDS:
        if kind in gaps:
            gap, error = np.concatenate(gaps[kind]), np.concatenate(errors[kind])
            print(f"{kind:22s} {len(gap):7d} {gap.mean():9.2e} {gap.max():9.2e} {error.max():19.1e}")


if __name__ == "__main__":
    main()
