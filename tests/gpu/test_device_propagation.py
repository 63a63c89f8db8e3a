"""
Devices of intermediate tensors, without a GPU: tensors of the device `meta` have a shape and no numbers.

An operator on tensors of two devices raises an error, so a tensor that the code makes on the wrong device is found.
Fake tensors of CUDA would do the same, but a build of torch for CPUs cannot move a tensor to them.
"""

import numpy as np
import pytest
import torch
import transformers
from gpu_support import VOCABULARY, layout_columns

import turnwise_segment_attention as segments

COLUMNS = layout_columns(300, "cpu")


def make_model():
    """Return a Qwen3 without numbers."""
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("meta").eval()


def devices(*tensors):
    """Return the types of the devices."""
    return {each.device.type for each in tensors}


def test_segment_attention():
    """Forward and backward pass stay on the device, and keep the data type."""
    shapes = [(1, heads, 300, 64) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    output = segments.segment_attention(*inputs, segments.plan(*COLUMNS))
    gradients = torch.autograd.grad(output.sum(), inputs)

    assert devices(output, *gradients) == {"meta"}
    assert {each.dtype for each in (output, *gradients)} == {torch.bfloat16}


def test_block_masks():
    """FlexAttention's blocks are made where the columns are."""
    mask = segments.block_mask(*(torch.zeros(1, 300, dtype=torch.int64, device="meta") for _ in range(2)))

    assert devices(mask.kv_indices, mask.kv_num_blocks, mask.q_indices, mask.full_kv_indices) == {"meta"}


def test_the_engines_pass_under_a_layout():
    """Arrays of the host become tensors on the model's device, and the pool is there, too."""
    from turnwise_transformers_engine.layouts.slot_cache import ForwardInput, PoolModel

    numbers = np.arange(6).reshape(2, 3)
    batch = ForwardInput(numbers, numbers, numbers, numbers, np.ones((2, 3, 3), bool))
    pool = PoolModel(make_model())
    logits = pool.forward(batch, num_slots=8)

    assert devices(logits, *pool.pool._keys, *pool.pool._values) == {"meta"}


@pytest.mark.parametrize("chunk", [None, 2])
def test_the_trainers_log_probabilities(chunk, monkeypatch):
    """The dense mask of parallel paths, log-probabilities, entropies and the loss are on the device."""
    from turnwise_grpo_trainer.learner.log_probs import token_log_probs
    from turnwise_grpo_trainer.learner.micro_batches import MicroBatch

    monkeypatch.setattr(torch, "equal", lambda *_: True)  # there are no numbers to compare
    block, path = (each[:, :40].expand(2, 40) for each in COLUMNS)
    token = torch.arange(40).expand(2, 40)
    micro = MicroBatch(
        input_ids=token, position_ids=token, block_start=block, path_start=path, row_ids=torch.zeros_like(token),
        keep=torch.arange(30), predictors=torch.ones(2, 20, dtype=torch.int64), labels=torch.arange(20),
        tokens=torch.arange(20), packed=False, has_blocks=True,
    )  # fmt: skip
    values, entropies = token_log_probs(make_model(), micro.to(torch.device("meta")), 0.7, entropy="value", chunk=chunk)

    values.sum().backward()

    assert devices(values, entropies) == {"meta"}
    assert values.dtype == torch.float32


def test_a_tensor_on_another_device_is_found():
    """The check can fail: a tensor of the host among tensors of the device is an error."""
    with pytest.raises(RuntimeError, match="is not on the expected device meta"):
        torch.zeros(2, device="meta") + torch.zeros(2)
