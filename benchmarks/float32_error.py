"""
How far float32 is off by itself: log-probabilities of sampled rows from the engine, and from transformers twice.

A trainer in float32 can agree with an engine in float32 no better than float32 agrees with float64 on the same row.

    turnwise rollout examples/calculator.yaml --out runs/rows
    python benchmarks/float32_error.py runs/rows/trajectories.parquet [--model FOLDER] [--temperature 1.0]
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from claims import machine
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

Rows = list[NDArray[np.float64]]


@torch.no_grad()
def log_probs(model: Any, rows: list[dict[str, Any]], temperature: float) -> Rows:
    """Return for each row the log-probabilities of what was sampled, from a forward pass over the row alone."""
    found = []
    for row in rows:
        ids = torch.tensor([*row["prompt_ids"], *row["response_ids"]])
        logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
        each = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].double().numpy()
        found.append(each[len(row["prompt_ids"]) - 1 :][np.array(row["response_mask"], bool)])
    return found


def line(name: str, one: Rows, other: Rows) -> str:
    """Return how far apart two are."""
    off = np.abs(np.concatenate(one) - np.concatenate(other))
    return f"{name:44s} mean {off.mean():.1e}  max {off.max():.1e}  above 1e-5: {(off > 1e-5).sum()} of {len(off)}"


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="trajectories.parquet of a rollout without parallel paths")
    parser.add_argument("--model", type=Path, default=Path(str(files("turnwise_calculator_demo"))) / "model")
    parser.add_argument("--temperature", type=float, default=1.0, help="that the rows were sampled with")
    parser.add_argument("--num", type=int, default=512, help="rows to read (default: 512)")
    options = parser.parse_args()
    rows = pq.read_table(options.rows).to_pylist()[: options.num]
    if any(any(row["block_start"] or ()) for row in rows):
        parser.error(f"{options.rows} has parallel paths; a forward pass without their mask would say nothing")
    engine = [np.array(row["logprobs"], float)[np.array(row["response_mask"], bool)] for row in rows]
    single, double = (
        log_probs(AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval(), rows, options.temperature)
        for dtype in (torch.float32, torch.float64)
    )
    print(machine())
    print(line("engine, float32 - transformers, float32", engine, single))
    print(line("transformers, float32 - transformers, float64", single, double))
    print(line("engine, float32 - transformers, float64", engine, double))


if __name__ == "__main__":
    main()
