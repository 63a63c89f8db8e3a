"""Packed batches, and the rows that they are made of."""

import os
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from turnwise.batch import packed_batch
from turnwise.batch.columns import COLUMNS, NO_TRAJECTORY, ROW_NAMES, make_rows
from turnwise.batch.packed_batch import PackedBatch, collate_packed
from turnwise.batch.rollout_batch import RolloutBatch, collate
from turnwise.errors import DataError, TrajectoryError
from turnwise.record.result import EpisodeResult, token_scores
from turnwise.record.trajectory import Trajectory
from turnwise.types import EpisodeMetrics, Placement, Status, Task, TokenScore, TrajectoryScore, TurnScore
from turnwise_testing.inputs.strategies import trajectories

PAD = 9
few = settings(max_examples=30, deadline=None)


def task(uid: str = "t0", **columns: object) -> Task:
    return Task(messages=({"role": "user", "content": "a"},), uid=uid, **columns)


def trajectory() -> Trajectory:
    record = Trajectory([1, 2])
    record.add_action([3, 4], [-0.5, -0.25], 2)
    record.add_observation([5])
    record.add_action([6], [-1.0], 3)
    return record


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
    """Return episodes as a packed batch."""
    packed = collate_packed(results, pad_token_id=pad_token_id)
    other = collate(results, pad_token_id=pad_token_id).packed()
    assert all(torch.equal(getattr(packed, name), getattr(other, name)) for name in (*COLUMNS, "cu_seqlens"))
    return packed


def rows_in(packed: PackedBatch, name: str) -> list[list]:
    """Return one column of a packed batch, row by row."""
    bounds = packed.cu_seqlens.tolist()
    column = getattr(packed, name)
    return [column[start:stop].tolist() for start, stop in pairwise(bounds)]


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
        for name, own, fill in (
            ("response_mask", "response_mask", 0),
            ("rollout_log_probs", "logprobs", 0.0),
            ("weight_versions", "weight_versions", -1),
        ):
            expected = [[fill] * r.num_prompt_tokens + getattr(r, own).tolist() for r in records]
            assert expected == rows_in(packed, name)
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
                expected.append([0.0] * record.num_prompt_tokens + values.tolist())
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
        """Ids and positions are int32 and masks uint8, where padded batches have int64 for all of them."""
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
        names = [attribute.name for attribute in rows[0].__attrs_attrs__]
        assert rows == make_rows({name: [getattr(row, name) for row in rows] for name in names}, 3)

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
def test_size_follows_the_real_tokens(tmp_path, num_short):
    """One long episode among short ones costs its own tokens, in memory and in the file."""
    record = Trajectory([1] * 10)
    record.add_action([2] * 20, [-0.5] * 20)
    longest = Trajectory([1] * 10)
    longest.add_action([2] * 8000, [-0.5] * 8000)
    episodes = [finished(record) for _ in range(num_short)] + [finished(longest)]
    num_tokens = 30 * num_short + 8010
    for trajectory in (record, longest):
        trajectory.close()

    collate_packed(episodes[:1], pad_token_id=0).save(tmp_path / "b.safetensors")  # imports torch's part of it
    tracemalloc.start()
    try:
        collate_packed(episodes, pad_token_id=0).save(tmp_path / "b.safetensors")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    size = (tmp_path / "b.safetensors").stat().st_size
    assert 22 * num_tokens < size < 22 * num_tokens + 300 * len(episodes) + 2000
    # The columns, their bytes for the file, and the arrays that the longest record computes.
    assert peak < 200 * num_tokens + 3000 * len(episodes) + 50_000
    assert num_tokens == len(PackedBatch.load(tmp_path / "b.safetensors").input_ids)


def finished(record: Trajectory) -> EpisodeResult:
    return EpisodeResult(task=task(), status=Status.COMPLETED, trajectories=(record,))


def test_a_packed_batch_without_blocks_takes_little_more_than_its_real_bytes(tmp_path):
    """In memory and in its file, at most 1.4 times the values of real tokens, and the same after a padded batch."""
    record = Trajectory(range(500))
    for _ in range(4):
        record.add_action(range(200), [-0.5] * 200)
        record.add_observation(range(60))
    results = [EpisodeResult(task=task(), status=Status.COMPLETED, agent_name="a", trajectories=(record,))] * 8
    # Ids and positions of all tokens; log-probability, score, version and two masks of response tokens.
    real_bytes = 8 * (len(record) * (4 + 4) + record.num_response_tokens * (4 + 4 + 4 + 1 + 1))

    packed = collate_packed(results, pad_token_id=PAD)
    packed.save(tmp_path / "batch.safetensors")
    for batch in (packed, packed.load(tmp_path / "batch.safetensors"), collate(results, pad_token_id=PAD).packed()):
        num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in batch.tensors.values())
        assert num_bytes <= 1.4 * real_bytes
    assert (tmp_path / "batch.safetensors").stat().st_size <= 1.4 * real_bytes


@pytest.mark.parametrize("with_blocks", [False, True])
def test_a_padded_batch_has_the_types_of_the_table(with_blocks, tmp_path):
    """Also one that was packed or saved in between, where ids, positions and masks have smaller types."""
    record = trajectory()
    if with_blocks:
        paths = record.fork(2)
        for path in paths:
            path.add_action([7], [-0.5], 2)
        record.join(paths)
    results = [EpisodeResult(task=task(), status=Status.COMPLETED, agent_name="a", trajectories=(record,))]
    padded = collate(results, pad_token_id=PAD)
    padded.save(tmp_path / "batch.safetensors")

    assert (padded.path_start > 0).any() == with_blocks
    for batch in (padded, RolloutBatch.from_packed(padded.packed()), RolloutBatch.load(tmp_path / "batch.safetensors")):
        for name, column in COLUMNS.items():
            assert getattr(batch, name).numpy().dtype == column.dtype
            assert torch.equal(getattr(batch, name), getattr(padded, name))


def test_a_file_keeps_the_metrics_of_its_rows(tmp_path):
    """And a file of a version that had none can be read."""
    metrics = EpisodeMetrics(extra={"programs_passed": np.float32(2)})
    result = EpisodeResult(task=task(), status=Status.COMPLETED, trajectories=(trajectory(),), metrics=metrics)
    packed = collate_packed([result], pad_token_id=PAD)
    packed.save(tmp_path / "batch.safetensors")
    columns = {name: packed.column(name) for name in ROW_NAMES if name != "metrics"}

    assert PackedBatch.load(tmp_path / "batch.safetensors").rows[0].metrics == {"programs_passed": 2.0}
    assert make_rows(columns, 1)[0].metrics == {}


def test_names_of_padded_batches_are_taken():
    """No field of a packed batch hides an attribute that a padded one has."""
    own = {name for name in {*dir(RolloutBatch)} - {*dir(PackedBatch)} if not name.startswith("_")}
    assert own == packed_batch._PADDED_NAMES


TYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
WRONG = [
    *[("input_ids", -1), ("position_ids", -1), ("block_start", -1), ("path_start", -1)],
    *[("response_mask", 2), ("loss_mask", 2), ("weight_versions", -2), ("num_turns", -1), ("prompt_lens", -1)],
    *[("rollout_log_probs", value) for value in (float("nan"), float("inf"), float("-inf"))],
]


@pytest.mark.parametrize("load", [PackedBatch.load, RolloutBatch.load])
class TestChangedFiles:
    """A file in which another program has changed a column is refused, and the error names the column."""

    def change(self, path, name, change):
        """Write a batch of one row, of which one column is changed."""
        result = EpisodeResult(task=task(), status=Status.COMPLETED, trajectories=(trajectory(),))
        collate_packed([result], pad_token_id=PAD).save(path)
        with safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata(), {each: file.get_tensor(each) for each in list(file.keys())}
        tensors.setdefault("block_start", torch.zeros(6, dtype=torch.int32))
        tensors.setdefault("path_start", torch.zeros(6, dtype=torch.int32))
        tensors[name] = change(tensors[name])
        save_file(tensors, path, metadata)
        return tensors[name].dtype

    @pytest.mark.many_cases
    @pytest.mark.parametrize("name", [*COLUMNS, "cu_seqlens", "prompt_lens"])
    def test_another_type(self, tmp_path, load, name):
        """Each type but the column's own is refused."""
        path = tmp_path / "b.safetensors"
        own = self.change(path, name, lambda values: values)
        load(path)
        for dtype in TYPES:
            if dtype != own:
                self.change(path, name, lambda values, dtype=dtype: values.to(dtype))
                with pytest.raises(DataError, match=f"{path}: not a saved batch: .*column '{name}' has type {dtype}"):
                    load(path)

    @pytest.mark.parametrize(("name", "value"), WRONG)
    def test_a_value_out_of_range(self, tmp_path, load, name, value):
        """A value that no batch has is refused."""
        path = tmp_path / "b.safetensors"
        self.change(path, name, lambda values: values.index_fill(0, torch.tensor([0]), value))
        with pytest.raises(DataError, match=f"{path}: not a saved batch: .*column '{name}' has values"):
            load(path)

    def test_a_pipe(self, tmp_path, load):
        """A pipe, from which a reader would wait for ever, is refused."""
        os.mkfifo(tmp_path / "b.safetensors")
        with pytest.raises(DataError, match="is no regular file"):
            load(tmp_path / "b.safetensors")
