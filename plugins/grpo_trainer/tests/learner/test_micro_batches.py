"""Sharding, packing and collating keep every token, and change neither visibility nor positions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from attrs import asdict
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, Trajectory
from turnwise.batch.rollout_batch import collate as batch_of
from turnwise_grpo_trainer.learner.micro_batches import collate, pack_by_tokens, shard
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.rows import TokenRows, pad, unpad

ROWS = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=12)


def make_rows(sizes):
    """Return rows of given lengths; all tokens but the first one are in the loss, or none is."""
    bounds, masks = [0], []
    for length, in_loss in sizes:
        bounds.append(bounds[-1] + length)
        masks += [0] + [int(in_loss)] * (length - 1)
    num = bounds[-1]
    zeros = torch.zeros(num, dtype=torch.int64)
    positions = torch.cat([torch.arange(length) for length, _ in sizes])
    columns = {
        "input_ids": torch.arange(num) + 100,
        "position_ids": positions,
        "block_start": zeros,
        "path_start": zeros,
        "loss_mask": torch.tensor(masks),
    }
    return TokenRows(columns, tuple(bounds))


@given(sizes=ROWS, num_shards=st.integers(1, 5))
def test_shards_are_a_partition(sizes, num_shards):
    """Every row with a token in the loss is in one shard, and the sizes of shards differ by at most one row."""
    rows = make_rows(sizes)

    shards = shard(rows, num_shards)

    trained = [row for row, (length, in_loss) in enumerate(sizes) if in_loss and length > 1]
    assert trained == sorted(row for each in shards for row in each)
    assert num_shards == len(shards)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    for each in shards:
        lengths = [sizes[row][0] for row in each]
        assert lengths == sorted(lengths, reverse=True)


@given(sizes=ROWS, max_tokens=st.integers(1, 40), packed=st.booleans())
def test_micro_batches_fit_the_budget(sizes, max_tokens, packed):
    """Every row is in one micro-batch of at most `max_tokens` tokens, including pads; longer rows are alone."""
    rows = make_rows(sizes)
    order = sorted(range(len(sizes)), key=lambda row: -sizes[row][0])

    groups = pack_by_tokens(rows, order, max_tokens=max_tokens, packed=packed)

    assert order == [row for group in groups for row in group]
    for group in groups:
        lengths = [sizes[row][0] for row in group]
        assert len(group) == 1 or (sum(lengths) if packed else len(group) * max(lengths)) <= max_tokens
        assert collate(rows, group, packed=packed).input_ids.numel() == (
            sum(lengths) if packed else len(group) * max(lengths)
        )


@given(sizes=ROWS, max_tokens=st.integers(1, 40))
def test_no_micro_batch_could_be_merged_with_the_next_row(sizes, max_tokens):
    """Packing is greedy: the first row of the next group did not fit into the current one."""
    rows = make_rows(sizes)
    order = sorted(range(len(sizes)), key=lambda row: -sizes[row][0])

    groups = pack_by_tokens(rows, order, max_tokens=max_tokens, packed=True)

    for group, following in itertools.pairwise(groups):
        assert sum(sizes[row][0] for row in (*group, following[0])) > max_tokens


@given(sizes=ROWS, packed=st.booleans())
def test_collating_keeps_every_token(sizes, packed):
    """A micro-batch has the ids and positions of its rows; labels, predictors and token indices belong together."""
    rows = make_rows(sizes)
    group = list(range(len(sizes)))

    micro = collate(rows, group, packed=packed)

    real = micro.real.bool()
    torch.testing.assert_close(micro.input_ids[real], rows["input_ids"])
    torch.testing.assert_close(micro.position_ids[real], rows["position_ids"])
    torch.testing.assert_close(micro.row_ids[real], rows.row_index)
    torch.testing.assert_close(rows["input_ids"][micro.tokens], micro.labels)
    torch.testing.assert_close(micro.tokens, rows.targets)
    # Rows have no paths, so the predictor is the token before the label.
    before = micro.input_ids[micro.predictors[0], micro.keep[micro.predictors[1]]]
    torch.testing.assert_close(before, micro.labels - 1)
    assert micro.attention_mask() is None


@given(sizes=ROWS)
def test_positions_continue_over_pads(sizes):
    """Positions rise by one to the end of a padded row: a jump would start another sequence in transformers."""
    micro = collate(make_rows(sizes), range(len(sizes)), packed=False)

    assert (micro.position_ids.diff(dim=1) == 1).all()


@pytest.mark.parametrize("packed", [False, True])
def test_the_mask_is_the_visibility_of_the_batch(mixed, packed):
    """With parallel paths, a token sees exactly the tokens that it saw in the record; rows and pads are separate."""
    rows = TokenRows.from_batch(mixed, compute_loss_mask(mixed))
    micro = collate(rows, range(len(rows)), packed=packed)
    mask = micro.attention_mask()[:, 0]

    expected = mixed.visibility()
    for row in range(len(rows)):
        real = mixed.attention_mask[row].bool()
        where = micro.row_ids == row
        (line,) = where.any(1).nonzero().flatten().tolist()
        own = mask[line][where[line]]
        assert torch.equal(own[:, where[line]], expected[row][real][:, real])
        assert not own[:, ~where[line]].any()


def test_a_micro_batch_moves_to_a_device(mixed):
    """A copy on a device has all tensors there, and the other attributes."""
    rows = TokenRows.from_batch(mixed, compute_loss_mask(mixed))
    micro = collate(rows, [1, 3], packed=True)

    moved = micro.to(torch.device("meta"))

    assert {"meta"} == {
        each.device.type for each in asdict(moved, recurse=False).values() if isinstance(each, torch.Tensor)
    }
    assert (moved.packed, moved.has_blocks) == (micro.packed, micro.has_blocks)


# Rows


def test_padding_is_the_inverse_of_unpadding(mixed):
    """Values of response tokens survive; pads become 0, and so do prompts."""
    values = torch.rand(mixed.response_mask.shape) * mixed.attention_mask[:, mixed.prompt_length :]

    tokens = unpad(mixed, values)

    torch.testing.assert_close(pad(mixed, tokens), values)
    assert len(tokens) == int(mixed.attention_mask.sum())
    prompts = mixed.attention_mask.bool().clone()
    prompts[:, mixed.prompt_length :] = False
    assert not tokens[prompts[mixed.attention_mask.bool()]].any()


def test_rows_have_the_tokens_of_the_batch(mixed):
    """Row by row, the columns equal the real tokens of the padded batch."""
    rows = TokenRows.from_batch(mixed, compute_loss_mask(mixed))

    for row in range(len(rows)):
        real = mixed.attention_mask[row].bool()
        part = slice(rows.bounds[row], rows.bounds[row + 1])
        for name in ("input_ids", "position_ids"):
            np.testing.assert_array_equal(rows[name][part], getattr(mixed, name)[row][real])
        assert (rows.row_index[part] == row).all()


def test_selected_rows(mixed):
    """A selection has the chosen rows in the given order, also repeated ones, and may be empty."""
    rows = TokenRows.from_batch(mixed, compute_loss_mask(mixed))

    chosen = rows.select([3, 1, 3])

    assert [rows.lengths[row] for row in (3, 1, 3)] == chosen.lengths
    first, second = (chosen["input_ids"][chosen.bounds[row] : chosen.bounds[row + 1]] for row in (0, 2))
    assert torch.equal(first, rows["input_ids"][rows.bounds[3] : rows.bounds[4]])
    assert torch.equal(first, second)
    assert (0, 0) == (len(rows.select([])), rows.select([]).num_tokens)


def test_the_first_token_of_a_row_is_never_a_target(conversations):
    """Nothing predicts the first token, so it is not in the loss, also where the mask includes it."""
    mask = torch.ones_like(conversations.response_mask)
    rows = TokenRows.from_batch(conversations, mask)
    everything = rows.with_columns(loss_mask=torch.ones(rows.num_tokens))

    assert not {*rows.bounds[:-1]} & {*rows.targets.tolist()}
    assert (everything.predictors <= torch.arange(rows.num_tokens)).all()
    starts = torch.tensor(rows.bounds[:-1])
    assert torch.equal(everything.predictors[starts], starts)


def test_rows_without_a_prompt():
    """The first token of such a row was sampled, and still has no predictor: it is not in the loss."""
    record = Trajectory([])
    record.add_action([5, 6, 7], [-0.5, -0.5, -0.5])
    batch = make_batch([record, record])

    rows = TokenRows.from_batch(batch, torch.ones_like(batch.response_mask))

    assert [1, 2, 4, 5] == rows.targets.tolist()
    assert [0, 0, 1, 3, 3, 4] == rows.predictors.tolist()


def make_batch(records):
    """Return a batch with a row for each record."""
    task = Task(messages=({"role": "user", "content": "?"},), uid="t")
    return batch_of(
        [
            EpisodeResult(task=task, rollout_n=number, status=Status.COMPLETED, trajectories=(record,))
            for number, record in enumerate(records)
        ],
        pad_token_id=0,
    )


def test_the_token_before_a_block_predicts_every_path(mixed):
    """The first tokens of parallel paths have the same predictor; every other token has the one before it."""
    rows = TokenRows.from_batch(mixed, compute_loss_mask(mixed)).select([1])
    index = torch.arange(rows.num_tokens)
    opens = (rows["path_start"] > 0) & (index == rows["path_start"])

    assert 3 == int(opens.sum())
    assert 1 == len({*rows.predictors[opens].tolist()})
    assert int(rows.predictors[opens][0]) == int(rows["block_start"][opens][0]) - 1
    others = ~opens & (index > 0)
    assert torch.equal(rows.predictors[others], index[others] - 1)
