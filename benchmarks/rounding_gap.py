"""
Measures how far products in bfloat16 move the embedded engine's log-probabilities from those in float32.

    python benchmarks/rounding_gap.py MODEL --text README.md

Each token of a text is decoded after the tokens before it. The figures are of the distributions of the next token: the
mean absolute difference of log-probabilities over tokens and probabilities, the largest difference for a token of the
text, and the KL divergence in nats.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from measurement import describe_machine
from torch import Tensor

from turnwise_transformers_engine.fused.model import Chunk, FusedModel
from turnwise_transformers_engine.fused.packed_product import SMALLEST, packing_refusal
from turnwise_transformers_engine.fused.slab import Slab


@torch.inference_mode()
def log_probs(fused: FusedModel, token_ids: Tensor) -> Tensor:
    """Return (N - 1, V) log-probabilities of the tokens after each token but the first."""
    slab = Slab.make(len(token_ids), fused.num_layers, fused.num_groups, fused.depth, token_ids.device)
    slab.reserve(1)
    fused.prefill([Chunk(slab, 0, 0, token_ids[:1].tolist())])
    rows = []
    for place in range(1, len(token_ids)):
        token, position = token_ids[place : place + 1], torch.tensor([place])
        rows.append(fused.decode(token, position, [(slab, 1, place + 1)]).log_softmax(-1))
    return torch.cat(rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("--text", type=Path, required=True, help="file with the text")
    parser.add_argument("--tokens", type=int, default=400, help="first tokens of the text (default: %(default)s)")
    arguments = parser.parse_args()
    if reason := packing_refusal(torch.bfloat16):
        parser.error(reason)
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    token_ids = torch.tensor(tokenizer(arguments.text.read_text("utf-8")).input_ids)[: arguments.tokens]
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    exact, rounded = (
        log_probs(FusedModel(model, arguments.tokens, SMALLEST, dtype), token_ids)
        for dtype in (torch.float32, torch.bfloat16)
    )
    probs, gaps = exact.exp(), (rounded - exact).abs()
    of_text = gaps[:-1].gather(-1, token_ids[2:, None])
    print(describe_machine())
    print(f"mean difference {(probs * gaps).sum(-1).mean():.4f}, largest for a token of the text {of_text.max():.3f}")
    print(f"KL divergence {(probs * (exact - rounded)).sum(-1).mean():.5f} nats, over {len(token_ids)} tokens")


if __name__ == "__main__":
    main()
