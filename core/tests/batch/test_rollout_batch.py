"""Tests of `turnwise.batch.rollout_batch`."""

import sys

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.batch.rollout_batch import RolloutBatch, collate
from turnwise.errors import DuplicateNameError, PluginError, TrajectoryError
from turnwise.record.lineage import RecordLineage
from turnwise.record.trajectory import Trajectory
from turnwise.types import Status, TrajectoryScore
from turnwise_testing.inputs.small_episodes import assert_same_batches, episode, forked, trajectory
from turnwise_testing.inputs.strategies import trajectories

PAD = 9
few = settings(max_examples=30, deadline=None)
TENSORS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "block_start",
    "path_start",
    "response_mask",
    "loss_mask",
    "rollout_log_probs",
    "rm_scores",
    "weight_versions",
    "num_turns",
    "scored",
    "episode_rewards",
)


def results(**options: object):
    """Draw finished episodes of zero to two records each, scored or not."""
    built = st.builds(
        lambda records, status, uid, scored: episode(
            *records,
            uid=uid,
            status=status,
            scores=tuple(TrajectoryScore(value=0.5) for _record in records) if scored else (),
        ),
        st.lists(trajectories(max_steps=4), max_size=2),
        st.sampled_from(Status),
        st.sampled_from("abc"),
        st.booleans(),
    )
    return st.lists(built, **{"max_size": 4} | options)


def with_fields_of_each_kind(batch: RolloutBatch) -> RolloutBatch:
    """Add a field of each alignment, 0 on pads."""
    total = batch.attention_mask.numel()
    per_token = (torch.arange(total).reshape(batch.attention_mask.shape) + 1) * batch.attention_mask
    per_response = per_token[:, batch.prompt_length :]
    return batch.with_fields(
        {
            "a_row": torch.arange(len(batch)).to(torch.bfloat16),
            "b_response": per_response.double(),
            "c_token": torch.stack([per_token, -per_token], -1),
        }
    )


class TestCollate:
    """Episodes to padded tensors."""

    def test_example(self):
        """Two rows by hand: prompts end and responses start at column P."""
        short = Trajectory([7])
        short.add_action([8], [-2.0], 5)
        scores = (TrajectoryScore(value=1.0),)
        batch = collate([episode(trajectory(), scores=scores), episode(short, status=Status.FAILED)], pad_token_id=PAD)
        assert batch.prompts.tolist() == [[1, 2], [PAD, 7]]
        assert batch.responses.tolist() == [[3, 4, 5, 6], [8, PAD, PAD, PAD]]
        assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6], [PAD, 7, 8, PAD, PAD, PAD]]
        assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 0, 0]]
        assert batch.response_mask.tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
        assert batch.loss_mask.tolist() == [[1, 1, 0, 1], [0, 0, 0, 0]]
        assert batch.rollout_log_probs.tolist() == [[-0.5, -0.25, 0.0, -1.0], [-2.0, 0.0, 0.0, 0.0]]
        assert batch.rm_scores.tolist() == [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
        assert batch.weight_versions.tolist() == [[2, 2, -1, 3], [5, -1, -1, -1]]
        assert batch.num_turns.tolist() == [2, 1]
        assert batch.scored.tolist() == [True, False]
        assert batch.prompt_lens.tolist() == [2, 1]
        assert batch.response_lens.tolist() == [4, 1]
        assert batch.group_index.tolist() == [0, 0]
        assert batch.column("uid") == ["t0", "t0"]

    def test_notebooks_show_one_line(self):
        """The text of a batch has shapes and names, and no tensor."""
        batch = collate([episode(trajectory())], pad_token_id=PAD)
        batch = batch.with_fields({"advantages": torch.zeros(1)})
        shape = tuple(batch.input_ids.shape)
        assert f"RolloutBatch(rows=1, input_ids={shape}, fields=['advantages'])" == repr(batch)
        assert f"PackedBatch(rows=1, input_ids=({shape[1]},), fields=['advantages'])" == repr(batch.packed())

    def test_layout_counts_columns(self):
        """The layout's indices move with the prompt's padding; 0 outside blocks stays."""
        batch = collate([episode(forked())], pad_token_id=PAD, prompt_length=3)
        assert batch.input_ids.tolist() == [[PAD, PAD, 1, 2, 3, 4, 5]]
        assert batch.position_ids.tolist() == [[0, 0, 0, 1, 2, 1, 3]]
        assert batch.block_start.tolist() == [[0, 0, 0, 3, 3, 3, 0]]
        assert batch.path_start.tolist() == [[0, 0, 0, 3, 3, 5, 0]]

    @few
    @given(results(), st.integers(0, 2), st.integers(0, 2))
    def test_padding_changes_no_real_token(self, episodes, more_prompt, more_response):
        """Under any padding, the real tokens of a row are its record, and pads hold their pad values."""
        tight = collate(episodes, pad_token_id=PAD)
        batch = collate(
            episodes,
            pad_token_id=PAD,
            prompt_length=tight.prompt_length + more_prompt,
            response_length=tight.response_length + more_response,
        )
        records = [record for result in episodes for record in result.trajectories or (Trajectory([]),)]
        assert len(batch) == len(records)
        for row, record in enumerate(records):
            real, answer = batch.attention_mask[row].bool(), batch.attention_mask[row, batch.prompt_length :].bool()
            left = batch.prompt_length - record.num_prompt_tokens
            assert list(range(left, left + len(record))) == real.nonzero().flatten().tolist()
            assert record.input_ids.tolist() == batch.input_ids[row][real].tolist()
            assert record.position_ids.tolist() == batch.position_ids[row][real].tolist()
            assert record.response_ids.tolist() == batch.responses[row][answer].tolist()
            assert record.response_mask.tolist() == batch.response_mask[row][answer].tolist()
            assert record.logprobs.tolist() == batch.rollout_log_probs[row][answer].tolist()
            assert record.weight_versions.tolist() == batch.weight_versions[row][answer].tolist()
        real, answer = batch.attention_mask.bool(), batch.attention_mask[:, batch.prompt_length :].bool()
        assert set(batch.input_ids[~real].tolist()) <= {PAD}
        assert set(batch.weight_versions[~answer].tolist()) <= {-1}
        for name in ("position_ids", "block_start", "path_start"):
            assert not getattr(batch, name)[~real].any()
        for name in ("response_mask", "loss_mask", "rollout_log_probs", "rm_scores"):
            assert not getattr(batch, name)[~answer].any()

    @few
    @given(results(max_size=2), st.integers(0, 3))
    def test_visibility_is_that_of_the_records(self, episodes, more_prompt):
        """The formula on columns agrees with `Trajectory.visible` on every pair of real tokens; pads see nothing."""
        tight = collate(episodes, pad_token_id=PAD)
        batch = collate(episodes, pad_token_id=PAD, prompt_length=tight.prompt_length + more_prompt)
        seen = batch.visibility()
        records = [record for result in episodes for record in result.trajectories or (Trajectory([]),)]
        for row, record in enumerate(records):
            real = batch.attention_mask[row].bool()
            size = range(len(record))
            expected = [[record.visible(q, k) for k in size] for q in size]
            assert expected == seen[row][real][:, real].tolist()
            assert not seen[row][~real].any()
            assert not seen[row][:, ~real].any()

    def test_visibility_of_a_block_at_the_beginning(self):
        """Without a prompt a block starts at index 0, which is also the value outside blocks."""
        record = Trajectory([])
        paths = record.fork(3)
        for token_id, path in enumerate(paths):
            path.add_action([token_id], [-1.0], 0)
        record.join(paths)
        batch = collate([episode(record)], pad_token_id=PAD, prompt_length=2)
        assert batch.visibility()[0, 2:, 2:].tolist() == torch.eye(3).bool().tolist()
        assert batch.packed().path_start.tolist() == record.path_start.tolist()

    def test_an_episode_without_trajectory_keeps_its_row(self):
        """Groups keep their size, and the row weighs nothing."""
        batch = collate([episode(trajectory()), episode(status=Status.FAILED)], pad_token_id=PAD)
        assert len(batch) == 2
        assert batch.attention_mask[1].sum() == batch.loss_mask[1].sum() == batch.num_turns[1] == 0
        assert batch.input_ids[1].tolist() == [PAD] * 6
        assert not batch.scored[1]

    def test_a_record_that_is_not_trained_has_no_row(self):
        """Its score reaches the tokens of the others; an episode of such records alone keeps one row without tokens."""
        lines = (RecordLineage(kind="auxiliary", trained=False), RecordLineage())
        scores = (TrajectoryScore(value=1.0), TrajectoryScore(value=0.5))
        some = episode(forked(), trajectory(), scores=scores, lineage=lines)
        none = episode(trajectory(), uid="t1", scores=scores[:1], lineage=lines[:1])
        batch = collate([some, none], pad_token_id=PAD)
        assert batch.attention_mask.sum(-1).tolist() == [6, 0]
        assert (batch.scored.tolist(), batch.episode_rewards.tolist()) == ([True, True], [1.5, 1.0])
        assert batch.rm_scores.sum() == 1.5

    def test_replayed_tokens_are_context(self):
        """They have mask 0 and keep their log-probabilities and weight versions."""
        branch = (record := trajectory()).branched(record.mark())
        branch.add_action([7], [-0.125], 4)
        batch = collate([episode(branch)], pad_token_id=PAD)
        assert batch.response_mask.tolist() == batch.loss_mask.tolist() == [[0, 0, 0, 0, 1]]
        assert batch.rollout_log_probs.tolist() == [[-0.5, -0.25, 0, -1.0, -0.125]]
        assert batch.weight_versions.tolist() == [[2, 2, -1, 3, 4]]

    def test_multiples_and_fixed_lengths(self):
        """Lengths that were not given are rounded up."""
        batch = collate([episode(trajectory())], pad_token_id=PAD, pad_to_multiple_of=8, prompt_length=3)
        assert (batch.prompt_length, batch.response_length) == (3, 8)

    def test_rows_that_do_not_fit(self):
        """Nothing is cut in silence."""
        with pytest.raises(TrajectoryError, match=r"^row 0 has 4 response tokens, 'response_length' is 3$"):
            collate([episode(trajectory())], pad_token_id=PAD, response_length=3)

    def test_no_results(self):
        """A batch of no rows goes through every form."""
        batch = collate([], pad_token_id=PAD)
        assert (len(batch), batch.prompt_length, batch.response_length) == (0, 0, 0)
        assert_same_batches(batch, RolloutBatch.from_packed(batch.packed()))

    def test_shapes_are_checked(self):
        """Tensors that disagree make no batch."""
        batch = collate([episode(trajectory())], pad_token_id=PAD)
        with pytest.raises(TrajectoryError, match=r"^rm_scores has shape \[1, 6\], expected \[1, 4\]$"):
            evolve(batch, rm_scores=batch.attention_mask.float())

    def test_cost(self):
        """Rows of 8 times the tokens run as many lines of Python, so no loop runs over tokens."""

        def num_lines(length):
            record = Trajectory(np.arange(length))
            for _turn in range(3):
                record.add_action(np.arange(length), -np.ones(length), 1)
                record.add_observation(np.arange(length))
            episodes = [episode(record) for _row in range(8)]
            collate(episodes, pad_token_id=PAD)  # so that caches are full
            lines = 0

            def count(_frame, event, _argument):
                nonlocal lines
                lines += event == "line"
                return count

            tracer = sys.gettrace()
            sys.settrace(count)
            try:
                collate(episodes, pad_token_id=PAD)
            finally:
                sys.settrace(tracer)
            return lines

        assert 0 < num_lines(128) < 1.1 * num_lines(16)


class TestParts:
    """Selecting and packing."""

    @few
    @given(results(), st.integers(0, 3), st.integers(1, 4))
    def test_packing_and_unpacking_are_inverse(self, episodes, more, multiple_of):
        """Fields of every alignment included."""
        tight = collate(episodes, pad_token_id=PAD)
        widths = {"prompt_length": tight.prompt_length + more, "pad_to_multiple_of": multiple_of}
        batch = with_fields_of_each_kind(collate(episodes, pad_token_id=PAD, **widths))
        packed = batch.packed()
        assert_same_batches(batch, RolloutBatch.from_packed(packed, **widths))
        assert len(packed.input_ids) == int(batch.attention_mask.sum())

    def test_padding_anew_moves_fields(self):
        """A field keeps its place at its tokens when the padding around it changes."""
        batch = with_fields_of_each_kind(collate([episode(forked())], pad_token_id=PAD))
        wide = RolloutBatch.from_packed(batch.packed(), prompt_length=2)
        assert wide.fields["b_response"].tolist() == [[2, 3, 4, 5]]
        assert wide.fields["c_token"][..., 0].tolist() == [[0, 1, 2, 3, 4, 5]]
        assert wide.fields["a_row"].tolist() == [0]

    @few
    @given(results(min_size=1), st.data())
    def test_select(self, episodes, data):
        """Rows in the given order, by indices, a mask or a slice; selecting and collating commute up to padding."""
        batch = with_fields_of_each_kind(collate(episodes, pad_token_id=PAD))
        index = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=4))
        chosen = batch.select(index)
        assert [batch.rows[i] for i in index] == list(chosen.rows)
        for name in TENSORS:
            assert torch.equal(getattr(batch, name)[torch.tensor(index, dtype=torch.int64)], getattr(chosen, name))
        mask = torch.zeros(len(batch), dtype=torch.bool)
        mask[index] = True
        assert_same_batches(batch.select(sorted(set(index))), batch.select(mask))
        assert_same_batches(batch.select(range(len(batch))[1:3]), batch.select(slice(1, 3)))

    def test_select_out_of_range(self):
        """A row that is not there is an error."""
        with pytest.raises(IndexError):
            collate([episode(trajectory())], pad_token_id=PAD).select([1])


class TestFields:
    """Fields of postprocessors."""

    @pytest.mark.parametrize("name", ["rm_scores", "prompts", "uid", "pad_token_id", "select", "mine"])
    def test_taken_names(self, name):
        """A tensor, a view, a row's attribute, a method and another field have their names already."""
        batch = collate([episode(trajectory())], pad_token_id=PAD).with_fields({"mine": torch.zeros(1)})
        text = f"field '{name}': the batch already has an attribute or a field of that name"
        with pytest.raises(DuplicateNameError, match=f"^{text}$"):
            batch.with_fields({name: torch.zeros(1)})

    def test_shape_is_checked(self):
        """A field has rows, and columns of the batch."""
        with pytest.raises(PluginError, match=r"^field 'mine' has shape \(1, 5\), expected"):
            collate([episode(trajectory())], pad_token_id=PAD).with_fields({"mine": torch.zeros(1, 5)})
