"""Log-probabilities and entropies by chunks equal those of whole logits, and need less memory."""

from __future__ import annotations

import weakref
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from turnwise.errors import ConfigError
from turnwise_grpo_trainer.config import LoraConfig, PolicyConfig
from turnwise_grpo_trainer.learner.log_probs import measure_logits, token_log_probs
from turnwise_grpo_trainer.learner.lora import BaseModel, add_adapters, find_adapters
from turnwise_grpo_trainer.learner.micro_batches import MicroBatch, collate
from turnwise_grpo_trainer.learner.models import load_policy
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.rows import TokenRows
from turnwise_testing.references.float64 import float64_throughout

POLICY = PolicyConfig(device="cpu")


def make_micro(batch, *, packed=False, group=None):
    """Return some rows of a batch, or all, as one micro-batch."""
    rows = TokenRows.from_batch(batch, compute_loss_mask(batch))
    return collate(rows, range(len(rows)) if group is None else group, packed=packed)


def run(model, micro, **options):
    """Return log-probabilities, entropies and the gradient of a loss of both."""
    model.zero_grad()
    log_probs, entropy = token_log_probs(model, micro, 0.7, entropy="gradient", **options)
    weights = torch.linspace(-1, 1, len(micro.labels))
    (weights * log_probs.exp() + weights.flip(0) * entropy).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return log_probs.detach(), entropy.detach(), gradient.clone()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    group=st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True),
    chunk=st.integers(1, 60),
    packed=st.booleans(),
    tied=st.booleans(),
)
def test_chunks_change_nothing(spec, mixed, group, chunk, packed, tied):
    """Values and gradients are the same for any chunk size, padded or packed, with tied weights or not."""
    micro = make_micro(mixed, packed=packed, group=group)
    model = load_policy(POLICY, spec)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())

    expected = run(model, micro)
    actual = run(model, micro, chunk=chunk)

    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() < 4e-6 * max(1.0, float(other.abs().max()))
    assert expected[2].abs().max() > 1e-3


class PeakMemory(TorchDispatchMode):
    """Measures the most bytes that were alive at once in new tensors with a whole vocabulary for each token."""

    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.vocabulary, self.hidden, self.live, self.peak = vocabulary, hidden, 0, 0
        self.known = weakref.WeakSet()

    def is_by_token(self, shape):
        """Return whether a tensor has logits of tokens; the head's weight and its gradient have as many columns."""
        return bool(shape) and self.vocabulary == shape[-1] and self.hidden != shape[0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=MappingProxyType({})):
        output = func(*args, **kwargs)
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and self.is_by_token(tensor.shape):
                self.count(tensor.untyped_storage())
        return output

    def count(self, storage):
        """Count a storage until it is freed."""
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.free, size)

    def free(self, size):
        """Stop counting a storage."""
        self.live -= size


def test_memory_is_that_of_a_chunk(spec, mixed):
    """Forward and backward pass hold the logits of a few chunks at most; whole logits need many times as much."""
    micro, model = make_micro(mixed), load_policy(POLICY, spec)
    vocabulary, hidden = 4000, model.config.hidden_size
    model.lm_head = torch.nn.Linear(hidden, vocabulary, bias=False)
    tokens, chunk = len(micro.labels), 4
    assert tokens > 20 * chunk

    peaks = []
    for size in (chunk, None):
        with PeakMemory(vocabulary, hidden) as memory:
            run(model, micro, chunk=size)
        peaks.append(memory.peak / (4 * vocabulary))

    by_chunk, whole = peaks
    # Logits, their scaled copy, log-softmax, softmax, and the gradients of these.
    assert by_chunk <= 8 * chunk + 1
    assert whole >= 2 * tokens


def test_a_model_that_changes_its_logits_is_refused(spec, mixed):
    """Caps and scales after the output head would be lost, so the error names the setting; whole logits still work."""
    micro, model = make_micro(mixed), load_policy(POLICY, spec)
    forward = model.forward

    def capped(**inputs):
        output = forward(**inputs)
        output.logits = 5 * (output.logits / 5).tanh()
        return output

    model.forward = capped

    with pytest.raises(ConfigError, match=r"train\.policy\.logits_mib: Qwen3ForCausalLM changes .*; set it to 0"):
        token_log_probs(model, micro, 1.0, chunk=4)
    assert len(micro.labels) == len(token_log_probs(model, micro, 1.0)[0])


def adapted(spec, **options):
    """Return a model whose untied head and queries have adapters that change the logits."""
    model = load_policy(POLICY, spec)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    add_adapters(model, LoraConfig(rank=2, target_modules=("q_proj", "lm_head"), **options), "")
    for layer in find_adapters(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    return model.train()


def test_the_base_of_an_adapted_head(spec, mixed):
    """The reference is the model without any adapter, also where the head is computed apart, in chunks."""
    micro, model = make_micro(mixed), adapted(spec)
    expected, _ = token_log_probs(load_policy(POLICY, spec), micro, 1.0)

    with torch.no_grad():
        for chunk in (None, 7):
            found, _ = token_log_probs(BaseModel(model), micro, 1.0, chunk=chunk)
            (measured,) = measure_logits(
                BaseModel(model),
                micro,
                lambda logits, ids: [logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]],
                chunk=chunk,
            )
            assert (found - expected).abs().max() < 1e-5
            assert (measured - expected).abs().max() < 1e-5
        own, _ = token_log_probs(model, micro, 1.0, chunk=7)
        assert (own - expected).abs().max() > 1e-2  # the adapters are on again


def test_the_dropout_of_an_adapted_head(spec, mixed):
    """The gradient belongs to the dropout of the forward pass, although the backward pass computes the head again."""
    micro, model = make_micro(mixed), adapted(spec, dropout=0.5).double()
    with float64_throughout():
        weight = model.lm_head.lora_A["default"].weight
        direction = torch.randn_like(weight)

        def loss():
            torch.manual_seed(0)
            return token_log_probs(model, micro, 1.0, chunk=7)[0].double().sum()

        loss().backward()
        slope, values = float((weight.grad * direction).sum()), []
        with torch.no_grad():
            for shift in (1e-3, -2e-3):
                weight.add_(shift * direction)
                values.append(float(loss()))
        steps = (values[0] - values[1]) / 2e-3

    assert abs(slope - steps) < 1e-2 * abs(steps)


def test_values_that_are_no_numbers_pass_through(spec, mixed):
    """A model with NaN in its states is not said to change its logits."""
    micro, model = make_micro(mixed), load_policy(POLICY, spec)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
        assert token_log_probs(model, micro, 1.0, chunk=4)[0].isnan().all()


def test_the_head_keeps_no_hooks(spec, mixed):
    """After the computation the model returns all logits again, also if the forward pass failed."""
    micro, model = make_micro(mixed), load_policy(POLICY, spec)

    token_log_probs(model, micro, 1.0, chunk=4)
    whole = model.model.norm
    model.model.norm = torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError):
        token_log_probs(model, micro, 1.0, chunk=4)
    model.model.norm = whole

    assert (2, 5) == model(input_ids=torch.zeros(2, 5, dtype=torch.int64)).logits.shape[:2]


@pytest.mark.parametrize("chunk", [None, 7])
def test_entropies(spec, mixed, chunk):
    """The entropy belongs to the tempered distribution: 0 <= H <= log(vocabulary), and it rises with temperature."""
    model, micro = load_policy(POLICY, spec), make_micro(mixed)

    with torch.no_grad():
        log_probs, cold = token_log_probs(model, micro, 0.5, entropy="gradient", chunk=chunk)
        _, hot = token_log_probs(model, micro, 2.0, entropy="value", chunk=chunk)
        plain, none = token_log_probs(model, micro, 0.5, chunk=chunk)

    assert none is None
    assert torch.equal(log_probs, plain)
    assert (cold > 0).all()
    assert (cold < hot).all()
    assert (hot < torch.log(torch.tensor(float(model.config.vocab_size)))).all()


def test_an_entropy_for_the_log_has_no_gradient(spec, mixed):
    """The value costs no backward pass, and equals the entropy with a gradient."""
    model, micro = load_policy(POLICY, spec), make_micro(mixed)

    _, value = token_log_probs(model, micro, 1.0, entropy="value", chunk=6)
    _, graded = token_log_probs(model, micro, 1.0, entropy="gradient", chunk=6)

    assert graded.requires_grad
    torch.testing.assert_close(value, graded.detach())


class Head(torch.nn.Module):
    """A model of an embedding and an output head, whose forward pass takes what a model of transformers takes."""

    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.embed = torch.nn.Embedding(vocabulary, hidden)
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False)

    def get_output_embeddings(self):
        """Return the output head."""
        return self.head

    def forward(self, *, input_ids, logits_to_keep, **_more):
        """Return the logits of the kept columns."""
        return SimpleNamespace(logits=self.head(self.embed(input_ids)[:, logits_to_keep]))


def made_micro(ids, labels):
    """Return a micro-batch of one row, in which each of the first columns predicts a label."""
    row, keep = ids[None], torch.arange(len(labels))
    zeros = torch.zeros_like(row)
    predictors = torch.stack([torch.zeros_like(keep), keep])
    return MicroBatch(row, zeros, zeros, zeros, zeros, keep, predictors, labels, keep, packed=False, has_blocks=False)


@settings(deadline=None, max_examples=60)
@given(
    vocabulary=st.integers(2, 70),
    num_labels=st.integers(0, 20),
    chunk=st.integers(1, 23),
    temperature=st.sampled_from([1.0, 0.7]),
    entropy=st.sampled_from(["none", "value", "gradient"]),
    seed=st.integers(0, 99),
)
def test_chunks_equal_whole_logits(vocabulary, num_labels, chunk, temperature, entropy, seed):
    """
    Each token's values are the same for any vocabulary and chunk; weights' gradients differ by rounding.

    A row without labels is one of the cases.
    """
    torch.manual_seed(seed)
    model = Head(vocabulary, 6)
    micro = made_micro(torch.randint(vocabulary, (num_labels + 1,)), torch.randint(vocabulary, (num_labels,)))
    found = []
    for size in (None, chunk):
        model.zero_grad()
        log_probs, entropies = token_log_probs(model, micro, temperature, entropy=entropy, chunk=size)
        values = [log_probs] if entropies is None else [log_probs, entropies]
        sum((each * torch.linspace(-1, 1, num_labels)).sum() for each in values if each.requires_grad).backward()
        found.append([*(each.detach() for each in values), *(each.grad for each in model.parameters())])

    for whole, by_chunk in zip(*found, strict=True):
        torch.testing.assert_close(by_chunk, whole, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_autograd_keeps_no_logits(entropy):
    """The loss of four times as many tokens keeps no tensor with the vocabulary for them: each chunk is recomputed."""

    def kept_logits(num_labels):
        torch.manual_seed(0)
        model, sizes = Head(997, 6), []
        own = {each.data_ptr() for each in model.parameters()}

        def keep(tensor):
            if 997 in tensor.shape and tensor.data_ptr() not in own:
                sizes.append(tensor.numel())
            return tensor

        micro = made_micro(torch.randint(997, (num_labels + 1,)), torch.randint(997, (num_labels,)))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            token_log_probs(model, micro, 0.7, entropy=entropy, chunk=8)
        return sum(sizes)

    assert 0 == kept_logits(40) == kept_logits(160)
