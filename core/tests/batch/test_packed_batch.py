"""Packed batches, and the rows that they are made of."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.batch import packed_batch
from turnwise.batch.columns import COLUMNS, NO_TRAJECTORY
from turnwise.batch.packed_batch import PackedBatch, collate_packed
from turnwise.batch.rollout_batch import RolloutBatch, collate
from turnwise.errors import TrajectoryError
from turnwise.record.result import EpisodeResult, token_scores
from turnwise.record.trajectory import Trajectory
from turnwise.types import EpisodeMetrics, Placement, Status, Task, TokenScore, TrajectoryScore, TurnScore
from turnwise_testing.inputs.small_episodes import assert_same_batches, trajectory
from turnwise_testing.inputs.strategies import trajectories

PAD = 9
few = settings(max_examples=30, deadline=None)


def task(uid: str = "t0", **columns: object) -> Task:
    return Task(messages=({"role": "user", "content": "a"},), uid=uid, **columns)


@st.composite
def scores_of(draw: st.DrawFn, record: Trajectory):
    """Draw a score that fits a record, of any level."""
    values = st.floats(-4, 4, width=32)
    kind = draw(st.sampled_from(["trajectory", "turn", "token"]))
    if kind == "trajectory":
        return TrajectoryScore(value=draw(values), at=draw(st.sampled_from(Placement)))
    if kind == "turn":
        return TurnScore(values=tuple(draw(values) for _turn in record.turns()))
    return TokenScore(values=tuple(draw(values) if mask else 0.0 for mask in record.response_mask))


@st.composite
def episode_results(draw: st.DrawFn):
    """Draw a finished episode: any status, no record, one or two, scored or not."""
    records = tuple(draw(st.lists(trajectories(max_steps=4), max_size=2)))
    scored = draw(st.booleans())
    return EpisodeResult(
        task=task(uid=draw(st.sampled_from("abc")), sample_index=draw(st.integers(0, 5)), data_source="sums"),
        rollout_n=draw(st.integers(0, 3)),
        global_step=draw(st.integers(0, 1)),
        validation=draw(st.booleans()),
        agent_name="tool_agent",
        status=draw(st.sampled_from(Status)),
        trajectories=records,
        scores=tuple(draw(scores_of(record)) for record in records) if scored else (),
    )


def pack(results, pad_token_id: int) -> PackedBatch:
    """Return episodes as a packed batch, which is equal to the padded one in both directions."""
    packed = collate_packed(results, pad_token_id=pad_token_id)
    padded = collate(results, pad_token_id=pad_token_id)
    other = padded.packed()
    assert all(torch.equal(getattr(packed, name), getattr(other, name)) for name in (*COLUMNS, "cu_seqlens"))
    assert_same_batches(padded, RolloutBatch.from_packed(packed))
    return packed


def rows_in(packed: PackedBatch, name: str) -> list[list]:
    """Return one column of a packed batch, row by row."""
    return [row.tolist() for row in packed.split(getattr(packed, name))]


def _kind_of_tokens(record):
    """Return whether a record has response tokens, and whether some were sampled."""
    return record.num_response_tokens > 0, bool(record.response_mask.any())


class TestPack:
    """Episodes laid end to end."""

    @few
    @given(st.lists(episode_results(), max_size=4))
    def test_rows_are_the_records(self, results):
        """Each row holds exactly its record's columns, shifted by nothing."""
        packed = pack(results, pad_token_id=PAD)
        records = [record for result in results for record in result.trajectories or (Trajectory([]),)]
        assert len(records) == len(packed)
        for name in ("input_ids", "position_ids", "block_start", "path_start"):
            assert [getattr(record, name).tolist() for record in records] == rows_in(packed, name)
        for name, own in (
            ("response_mask", "response_mask"),
            ("rollout_log_probs", "logprobs"),
            ("weight_versions", "weight_versions"),
        ):
            assert [getattr(record, own).tolist() for record in records] == rows_in(packed, name)
        assert [len(record.turns()) for record in records] == packed.num_turns.tolist()
        assert [record.num_prompt_tokens for record in records] == packed.prompt_lens.tolist()
        assert [record.num_response_tokens for record in records] == packed.response_lens.tolist()
        assert max(map(len, records), default=0) == max(packed.cu_seqlens.diff().tolist(), default=0)

    @few
    @given(st.lists(episode_results(), max_size=4))
    def test_scores_lie_where_token_scores_says(self, results):
        """
        Scores equal `token_scores`; rows without a score are marked and hold 0.

        Only a record without sampled tokens, or without any, gives its score to another row that has some.
        """
        results = [each for each in results if len(set(map(_kind_of_tokens, each.trajectories))) < 2]
        packed = pack(results, pad_token_id=PAD)
        expected, scored = [], []
        for result in results:
            for index, record in enumerate(result.trajectories):
                score = result.scores[index] if result.scores else None
                values = np.zeros(record.num_response_tokens) if score is None else token_scores(score, record)
                expected.append(values.tolist())
                scored.append(score is not None)
            if not result.trajectories:
                expected.append([])
                scored.append(False)
        assert expected == rows_in(packed, "rm_scores")
        assert scored == packed.scored.tolist()

    @few
    @given(st.lists(episode_results(), max_size=4))
    def test_failed_rows_are_masked_from_the_loss(self, results):
        """The loss mask is the response mask, but 0 in rows that failed."""
        packed = pack(results, pad_token_id=PAD)
        kept = [row.status is not Status.FAILED for row in packed.rows]
        expected = [[m * keep for m in mask] for mask, keep in zip(rows_in(packed, "response_mask"), kept, strict=True)]
        assert expected == rows_in(packed, "loss_mask")

    def test_types(self):
        """Ids and positions are int32 and masks uint8, as in padded batches."""
        packed = pack(
            [EpisodeResult(task=task(), status=Status.COMPLETED, trajectories=(trajectory(),))], pad_token_id=0
        )
        expected = {
            torch.int64: ("prompt_lens", "num_turns"),
            torch.int32: ("input_ids", "position_ids", "block_start", "path_start", "weight_versions", "cu_seqlens"),
            torch.uint8: ("response_mask", "loss_mask"),
        }
        for dtype, names in expected.items():
            assert {dtype} == {getattr(packed, name).dtype for name in names}
        assert {torch.float32} == {packed.rollout_log_probs.dtype, packed.rm_scores.dtype}

    def test_row_columns(self):
        """A row says which episode and which of its trajectories it is."""
        results = [
            EpisodeResult(
                task=task("u", sample_index=4, data_source="sums"),
                rollout_n=2,
                global_step=7,
                validation=True,
                agent_name="tool_agent",
                status=Status.TRUNCATED,
                trajectories=(trajectory(), trajectory()),
                metrics=EpisodeMetrics(extra={"hits": np.float32(2)}),
            ),
            EpisodeResult(task=task("v"), status=Status.FAILED),
        ]
        rows = pack(results, pad_token_id=0).rows
        assert [row.trajectory_index for row in rows] == [0, 1, NO_TRAJECTORY]
        assert (
            rows[1].uid,
            rows[1].sample_index,
            rows[1].rollout_n,
            rows[1].global_step,
            rows[1].validation,
            rows[1].status,
            rows[1].agent_name,
            rows[1].data_source,
        ) == ("u", 4, 2, 7, True, Status.TRUNCATED, "tool_agent", "sums")
        assert [row.metrics for row in rows] == [{"hits": 2.0}, {"hits": 2.0}, {}]

    def test_no_results(self):
        """A batch of no rows has all its columns."""
        packed = pack([], pad_token_id=0)
        assert (
            len(packed),
            packed.cu_seqlens.tolist(),
            len(packed.input_ids),
            max(packed.cu_seqlens.diff().tolist(), default=0),
        ) == (0, [0], 0, 0)

    def test_scores_that_do_not_fit(self):
        """The episode is named, whether the number of scores is wrong or one of them."""
        episode = {"task": task("u"), "rollout_n": 1, "status": Status.COMPLETED, "trajectories": (trajectory(),)}
        with pytest.raises(TrajectoryError, match=r"^episode u/1: 2 scores for 1 trajectories$"):
            pack([EpisodeResult(**episode, scores=(TrajectoryScore(value=1.0),) * 2)], pad_token_id=0)
        with pytest.raises(TrajectoryError, match=r"^episode u/1: 3 turn scores for 2 turns$"):
            pack([EpisodeResult(**episode, scores=(TurnScore(values=(1.0, 2.0, 3.0)),))], pad_token_id=0)


class TestGroups:
    """Which rows belong together."""

    def test_numbers_go_by_first_appearance(self):
        """A group is one task at one step, training or validation."""
        episodes = [("b", 0, False), ("a", 0, False), ("b", 0, False), ("b", 1, False), ("b", 0, True)]
        results = [
            EpisodeResult(task=task(uid), global_step=step, validation=validation, status=Status.COMPLETED)
            for uid, step, validation in episodes
        ]
        assert collate(results, pad_token_id=0).group_index.tolist() == [0, 1, 0, 2, 3]


@pytest.mark.parametrize("num_short", [50, 200])
def test_size_follows_the_real_tokens(num_short):
    """One long episode among short ones costs its own tokens."""
    record = Trajectory([1] * 10)
    record.add_action([2] * 20, [-0.5] * 20)
    longest = Trajectory([1] * 10)
    longest.add_action([2] * 8000, [-0.5] * 8000)
    episodes = [finished(record) for _ in range(num_short)] + [finished(longest)]
    num_tokens = 30 * num_short + 8010
    for each in (record, longest):
        each.close()

    tracemalloc.start()
    try:
        batch = collate_packed(episodes, pad_token_id=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    # The columns, and the arrays that the longest record computes.
    assert peak < 200 * num_tokens + 3000 * len(episodes) + 50_000
    assert num_tokens == len(batch.input_ids)


def finished(record: Trajectory) -> EpisodeResult:
    return EpisodeResult(task=task(), status=Status.COMPLETED, trajectories=(record,))


@pytest.mark.parametrize("with_blocks", [False, True])
def test_a_padded_batch_has_the_types_of_the_table(with_blocks):
    """Also one that was packed in between, where ids, positions and masks have smaller types."""
    record = trajectory()
    if with_blocks:
        paths = record.fork(2)
        for path in paths:
            path.add_action([7], [-0.5], 2)
        record.join(paths)
    results = [EpisodeResult(task=task(), status=Status.COMPLETED, agent_name="a", trajectories=(record,))]
    padded = collate(results, pad_token_id=PAD)

    assert (padded.path_start > 0).any() == with_blocks
    wide = padded.as_int64()
    for batch in (padded, RolloutBatch.from_packed(padded.packed()), RolloutBatch.from_packed(wide.packed())):
        for name, column in COLUMNS.items():
            assert getattr(batch, name).numpy().dtype == column.dtype
            assert torch.equal(getattr(batch, name), getattr(padded, name))
    widened = {"input_ids", "position_ids", "response_mask", "loss_mask", "attention_mask"}
    for name in (*COLUMNS, "attention_mask"):
        own = getattr(padded, name)
        assert (torch.int64 if name in widened else own.dtype) == getattr(wide, name).dtype
        assert torch.equal(getattr(wide, name), own.to(getattr(wide, name).dtype))


def test_names_of_padded_batches_are_taken():
    """No field of a packed batch hides an attribute that a padded one has."""
    own = {name for name in {*dir(RolloutBatch)} - {*dir(PackedBatch)} if not name.startswith("_")}
    assert own == packed_batch._PADDED_NAMES
