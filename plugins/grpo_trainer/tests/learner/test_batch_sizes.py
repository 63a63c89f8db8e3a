"""The sizes of micro-batches and chunks follow the memory that they need."""

from __future__ import annotations

import pytest
import torch

from turnwise_grpo_trainer.config import LoraConfig, PolicyConfig
from turnwise_grpo_trainer.learner import batch_sizes
from turnwise_grpo_trainer.learner.batch_sizes import BatchSizes, kept_bytes_per_token
from turnwise_grpo_trainer.learner.models import load_policy

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_chunk_has_a_size_in_bytes(spec):
    """The vocabulary decides how many tokens fit; at least one does, and 0 means all of them."""
    model = load_policy(PolicyConfig(device="cpu"), spec)
    model.config.vocab_size = 1 << 16

    chunks = [BatchSizes.choose(PolicyConfig(logits_mib=mib), model, CPU).logits_chunk for mib in (None, 1, 0.01, 0)]

    assert [128, 4, 1, None] == chunks
    assert BatchSizes(8192, 2048) == BatchSizes.choose(PolicyConfig(), model, GPU)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "turnwise_segments"])
@pytest.mark.parametrize("lora", [None, LoraConfig(dropout=0.5)])
def test_micro_batches_fit_a_limit_on_a_cpu(spec, monkeypatch, attention, lora):
    """A fraction of the memory gives a fraction of the tokens; a setting comes before it."""
    config = PolicyConfig(device="cpu", attn_implementation=attention)
    model = load_policy(config, spec, lora)
    each = kept_bytes_per_token(model)
    assert 1_000 < each < 100_000
    assert 8192 == BatchSizes.choose(config, model, CPU).micro_batch_tokens
    monkeypatch.setattr(batch_sizes, "_KEPT_BYTES", 100.5 * each)

    assert 100 == BatchSizes.choose(config, model, CPU).micro_batch_tokens
    set_by_hand = PolicyConfig(device="cpu", attn_implementation=attention, max_tokens_per_micro_batch=7)
    assert 7 == BatchSizes.choose(set_by_hand, model, CPU).micro_batch_tokens


def test_the_measurement_draws_no_random_numbers(spec):
    """Adapters with dropout draw in a forward pass; the training must draw the same numbers with any setting."""
    model = load_policy(PolicyConfig(device="cpu"), spec, LoraConfig(dropout=0.5))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)

    kept_bytes_per_token(model)

    assert torch.equal(expected, torch.rand(3))


def test_checkpointing_keeps_less(spec):
    """The measurement sees that activations are recomputed."""
    plain, checkpointed = (
        load_policy(PolicyConfig(device="cpu", gradient_checkpointing=on), spec) for on in (False, True)
    )

    assert kept_bytes_per_token(checkpointed) < kept_bytes_per_token(plain) / 4
