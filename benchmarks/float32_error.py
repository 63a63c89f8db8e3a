"""
How far float32 is off by itself: log-probabilities of sampled rows from the engine, and from transformers twice.

A trainer in float32 can agree with an engine in float32 no better than float32 agrees with float64 on the same row.

    turnwise rollout examples/calculator.yaml --out runs/rows
    python benchmarks/float32_error.py runs/rows [--num 512]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from claims import machine
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from turnwise.config_file import load_config
from turnwise.storage import read_results
from turnwise.testing.dense import token_logprobs
from turnwise.trajectory import Trajectory

Values = NDArray[np.float64]


def expected(model: Any, records: list[Trajectory], temperature: float) -> Values:
    """Return the log-probabilities of all sampled tokens, each row in a forward pass of its own, under its layout."""
    found = []
    for record in records:
        responses = token_logprobs(model, record, temperature)[record.num_prompt_tokens :]
        found.append(responses[record.response_mask == 1])
    return np.concatenate(found)


def line(name: str, one: Values, other: Values) -> str:
    """Return how far apart two are."""
    off = np.abs(one - other)
    return f"{name:44s} mean {off.mean():.1e}  max {off.max():.1e}  above 1e-5: {(off > 1e-5).sum()} of {len(off)}"


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder that `turnwise rollout --out` wrote")
    parser.add_argument("--num", type=int, default=512, help="rows to compare (default: 512)")
    options = parser.parse_args()
    config = load_config(options.run / "config.resolved.yaml")
    results = read_results(options.run / "trajectories.parquet")
    records = [record for result in results for record in result.trajectories][: options.num]
    engine = np.concatenate([record.logprobs[record.response_mask == 1] for record in records])
    single, double = (
        expected(
            AutoModelForCausalLM.from_pretrained(config.model_spec().path, dtype=dtype).eval(),
            records,
            config.rollout.sampling.temperature,
        )
        for dtype in (torch.float32, torch.float64)
    )
    print(machine())
    print(line("engine, float32 - transformers, float32", engine, single))
    print(line("transformers, float32 - transformers, float64", single, double))
    print(line("engine, float32 - transformers, float64", engine, double))


if __name__ == "__main__":
    main()
