"""Plans of passes: trees stay together within the budget, in all processes alike, and forests pay for themselves."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from turnwise_grpo_trainer.config import LoraConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner import prefix_sharing
from turnwise_grpo_trainer.learner.passes import Packing, Sharing
from turnwise_grpo_trainer.learner.prefix_sharing import find_sharing
from turnwise_grpo_trainer.objective.rows import TokenRows

FREE = Sharing(pair_cost=0.0, is_dense=False)
CONFIG = TrainConfig(policy=PolicyConfig(device="cpu"))
SHAPE = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def make_rows(contexts):
    """Return rows of ids, whose tokens but the first are in the loss."""
    bounds = [0]
    for ids in contexts:
        bounds.append(bounds[-1] + len(ids))
    positions = torch.cat([torch.arange(len(ids)) for ids in contexts])
    zeros = torch.zeros(bounds[-1], dtype=torch.int64)
    columns = {
        "input_ids": torch.tensor([token for ids in contexts for token in ids]),
        "position_ids": positions,
        "block_start": zeros,
        "path_start": zeros,
        "loss_mask": (positions > 0).long(),
    }
    return TokenRows(columns, tuple(bounds))


def group(prompt, answer, *, start=0, num=8):
    """Return contexts of answers to one prompt, which share no token of the answers."""
    return [[start, *[1] * (prompt - 1), *[10 + number] * answer] for number in range(num)]


CONTEXTS = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=12)


@given(
    contexts=CONTEXTS,
    num_shards=st.integers(1, 4),
    max_tokens=st.integers(1, 40),
    packed=st.booleans(),
    sharing=st.sampled_from([None, FREE, Sharing(0.05, is_dense=True)]),
)
def test_every_row_is_computed_once(contexts, num_shards, max_tokens, packed, sharing):
    """Each row is in one pass of one process; passes fit the budget, and have as many tokens as the plan says."""
    rows = make_rows(contexts)
    packing = Packing(max_tokens, packed, sharing)

    plan = packing.plan(rows, num_shards)

    assert list(range(len(rows))) == sorted(row for share in plan.shares for each in share for row in each.rows)
    assert num_shards == len(plan.shares)
    assert rows.num_tokens == plan.row_tokens
    for share in plan.shares:
        for each in share:
            assert len(each.rows) == 1 or each.num_tokens <= max_tokens
            assert each.num_tokens == packing.collate(rows, each).input_ids.numel()
    counted = [
        len(micro.tokens)
        for rank in range(num_shards)
        for micro, counts in packing.micro_batches(rows, plan, rank)
        if counts
    ]
    assert len(rows.targets) == sum(counted)
    numbers = {len(list(packing.micro_batches(rows, plan, rank))) for rank in range(num_shards)}
    assert 1 == len(numbers)


def test_a_group_is_forwarded_with_one_prompt():
    """Eight answers as long as the prompt: nine lengths in place of sixteen. This is the most that can be saved."""
    plan = Packing(10_000, packed=False, sharing=FREE).plan(make_rows(group(50, 50)), 1)

    assert (9 * 50, 16 * 50) == (plan.forwarded_tokens, plan.row_tokens)
    assert [True] == [each.is_forest for share in plan.shares for each in share]


def test_rows_that_share_nothing_are_as_before():
    """Without a common first token, and without sharing, the plans are equal."""
    rows = make_rows([[number, *[5] * number] for number in range(1, 9)])

    assert Packing(60, packed=False, sharing=FREE).plan(rows, 2) == Packing(60, packed=False).plan(rows, 2)


def test_a_short_common_beginning_is_not_worth_a_forest():
    """One token of a thousand saves less than 5 %: rows of equal length stay separate."""
    rows = make_rows([[0, *[number] * 1000] for number in range(1, 5)])

    (only,) = Packing(10_000, packed=False, sharing=FREE).plan(rows, 1).shares[0]

    assert not only.is_forest


def test_dense_attention_keeps_trees_apart():
    """With a mask of all pairs, two prompts in one forest would cost more than two forests, and long ones cost more."""
    rows = make_rows([*group(100, 20), *group(100, 20, start=7)])

    cheap = Packing(10_000, packed=False, sharing=Sharing(1e-9, is_dense=True)).plan(rows, 1)
    plan = Packing(10_000, packed=False, sharing=Sharing(1e-3, is_dense=True)).plan(rows, 1)
    dear = Packing(10_000, packed=False, sharing=Sharing(10.0, is_dense=True)).plan(rows, 1)

    assert [16] == [len(each.rows) for each in cheap.shares[0]]
    assert [8, 8] == [len(each.rows) for each in plan.shares[0]]
    assert [False] == [each.is_forest for each in dear.shares[0]]


def test_processes_share_the_trees():
    """Two groups of equal size on two processes: each computes one, with its prompt once."""
    rows = make_rows([*group(60, 10), *group(60, 10, start=7)])

    plan = Packing(10_000, packed=False, sharing=FREE).plan(rows, 2)

    assert [[140], [140]] == [[each.num_tokens for each in share] for share in plan.shares]


def test_rows_beyond_a_sliding_window_are_separate():
    """A mask of a forest replaces the model's own, so rows longer than the window keep the model's."""
    rows = make_rows(group(50, 50))
    for window, is_forest in ((100, True), (99, False)):
        plan = Packing(10_000, packed=False, sharing=evolve(FREE, window=window)).plan(rows, 1)
        assert [is_forest] == [each.is_forest for each in plan.shares[0]]


# Models


def qwen(**options):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **options))


def test_a_plain_model_can():
    """Dense attention is known to compute all pairs; the option switches sharing off without a word."""
    with capture_logs() as logs:
        found = find_sharing(CONFIG, qwen())
        off = find_sharing(evolve(CONFIG, policy=evolve(CONFIG.policy, share_prefixes=False)), qwen())

    assert (True, None) == (found.is_dense, found.window)
    assert 0 < found.pair_cost < 1
    assert off is None
    assert [] == logs


def test_a_sliding_window_is_a_limit():
    """Of a model with sliding windows, rows up to the window can be shared."""
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=64))

    assert 64 == find_sharing(CONFIG, model).window


class Mixer(torch.nn.Module):
    """A layer that adds the token of the column before, as convolutions and recurrent states do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden, *arguments, **options):
        return self.inner(hidden + hidden.roll(1, 1), *arguments, **options)


def mixing():
    model = qwen()
    model.model.layers[0].mlp = Mixer(model.model.layers[0].mlp)
    return model


def refusing():
    model = qwen()
    model.model.layers[0].mlp = torch.nn.Linear(3, 3)
    return model


def named(kinds):
    model = qwen()
    model.config.layer_types = kinds
    return model


def flash():
    model = qwen()
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize(
    ("make", "config", "reason"),
    [
        (mixing, CONFIG, "a small forest differs from separate rows by"),
        (refusing, CONFIG, "the model refuses a forest (RuntimeError: "),
        (lambda: named(["linear_attention", "full_attention"]), CONFIG, "layers of the kind linear_attention"),
        (flash, CONFIG, "attn_implementation=flash_attention_2 takes no mask of a forest"),
        (qwen, evolve(CONFIG, lora=LoraConfig(dropout=0.1)), "train.lora.dropout draws its own numbers"),
    ],
)
def test_models_that_cannot_say_so_once(make, config, reason):
    """Other layers, a refusal or dropout: one log line with the reason, and separate rows."""
    with capture_logs() as logs:
        assert find_sharing(config, make()) is None

    (line,) = logs
    assert "info" == line["log_level"]
    assert line["event"].startswith("shared prefixes are forwarded once for each row: ")
    assert reason in line["event"]


def test_the_check_draws_no_numbers():
    """A resumed training draws the same numbers: the check of the model leaves torch's state as it is."""
    model = qwen()
    before = torch.get_rng_state()
    find_sharing(CONFIG, model)

    assert torch.equal(before, torch.get_rng_state())
    assert prefix_sharing.find_obstacle(CONFIG, model) is None
