"""
Measures float32's rounding error in log-probabilities: engine, transformers in float32 and transformers in float64.

A float32 trainer and a float32 engine cannot agree better than float32 agrees with float64 on the same rows.

    turnwise rollout examples/calculator.yaml --out runs/rows
    python benchmarks/float32_error.py runs/rows [--num 512]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measurement import describe_machine
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from turnwise.config.file import load_config
from turnwise.record.trajectory import Trajectory
from turnwise_result_files import read_results
from turnwise_testing.references.dense import token_logprobs

Values = NDArray[np.float64]


def compute_logprobs(model: Any, records: list[Trajectory], temperature: float) -> Values:
    """Return the log-probabilities of all sampled tokens, from one forward pass per row under its layout."""
    values = []
    for record in records:
        responses = token_logprobs(model, record, temperature)[record.num_prompt_tokens :]
        values.append(responses[record.response_mask == 1])
    return np.concatenate(values)


def format_difference(name: str, first: Values, second: Values) -> str:
    """Return one line with the differences of two sets of log-probabilities."""
    gap = np.abs(first - second)
    return f"{name:44s} mean {gap.mean():.1e}  max {gap.max():.1e}  above 1e-5: {(gap > 1e-5).sum()} of {len(gap)}"


def main() -> None:
    """Compare and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of `turnwise rollout`")
    parser.add_argument("--num", type=int, default=512, help="rows to compare (default: 512)")
    options = parser.parse_args()
    config = load_config(options.run / "config.resolved.yaml")
    results = read_results(options.run / "trajectories.parquet")
    records = [record for result in results for record in result.trajectories][: options.num]
    engine = np.concatenate([record.logprobs[record.response_mask == 1] for record in records])
    single, double = (
        compute_logprobs(
            AutoModelForCausalLM.from_pretrained(config.model_spec().path, dtype=dtype).eval(),
            records,
            config.rollout.sampling.temperature,
        )
        for dtype in (torch.float32, torch.float64)
    )
    print(describe_machine())
    print(format_difference("engine, float32 - transformers, float32", engine, single))
    print(format_difference("transformers, float32 - transformers, float64", single, double))
    print(format_difference("engine, float32 - transformers, float64", engine, double))


if __name__ == "__main__":
    main()
