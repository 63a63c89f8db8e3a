"""Batches in files and as TensorDicts."""

import json
import os
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from turnwise import EpisodeResult, RolloutBatch, Status, Trajectory, TrajectoryScore
from turnwise.batch.columns import COLUMNS, ROW_NAMES
from turnwise.batch.packed_arrays import pack_arrays
from turnwise.batch.packed_batch import collate_packed
from turnwise.batch.rollout_batch import collate
from turnwise.errors import DataError, PluginError, TrajectoryError, TurnwiseError
from turnwise.types import EpisodeMetrics
from turnwise_result_files import from_tensordict, load_batch, load_packed_batch, save_batch, to_tensordict
from turnwise_result_files.batch_file import save_arrays
from turnwise_testing.inputs.small_episodes import assert_same_batches, episode, forked, trajectory
from turnwise_testing.inputs.strategies import trajectories

PAD = 9
PACKED = (*COLUMNS, "cu_seqlens", "prompt_lens")


def scored(records: list[Trajectory], uid: str, status: Status) -> EpisodeResult:
    scores = tuple(TrajectoryScore(value=0.5) for _record in records)
    return episode(*records, uid=uid, status=status, scores=scores)


RESULTS = st.lists(
    st.builds(scored, st.lists(trajectories(max_steps=4), max_size=2), st.sampled_from("abc"), st.sampled_from(Status)),
    max_size=4,
)


def batch_of(*episodes: EpisodeResult, **widths: int) -> RolloutBatch:
    """Return a batch with a field of each alignment, 0 on pads."""
    batch = collate(episodes, pad_token_id=PAD, **widths)
    per_token = (torch.arange(batch.input_ids.numel()).reshape(batch.input_ids.shape) + 1) * batch.attention_mask
    return batch.with_fields(
        {
            "a_row": torch.arange(len(batch)).to(torch.bfloat16),
            "b_response": per_token[:, batch.prompt_length :].double(),
            "c_token": torch.stack([per_token, -per_token], -1),
        }
    )


class TestTensorDict:
    """To tensordict and back."""

    @settings(max_examples=30, deadline=None)
    @given(RESULTS)
    def test_round_trip(self, episodes):
        """Everything comes back, fields and rows included."""
        batch = batch_of(*episodes)
        assert_same_batches(batch, from_tensordict(to_tensordict(batch)))

    def test_contents(self):
        """Trainers find the tensors by name and the rest as non-tensor data, and may cut and join it."""
        tensordict = to_tensordict(batch_of(*(episode(trajectory(), uid=uid) for uid in "abc")))
        assert tensordict["prompts"].tolist() == [[1, 2]] * 3
        assert tensordict["responses"].shape == (3, 4)
        assert list(tensordict["uid"]) == ["a", "b", "c"]
        joined = torch.cat([tensordict[2:], tensordict[torch.tensor([0])]])
        assert from_tensordict(joined).column("uid") == ["c", "a"]

    def test_missing_entries(self):
        """The error names the missing entries."""
        tensordict = to_tensordict(batch_of(episode(trajectory())))
        with pytest.raises(PluginError, match=r"^a TensorDict of a batch lacks rm_scores, uid$"):
            from_tensordict(tensordict.exclude("rm_scores", "uid"))


class TestFiles:
    """Safetensors and back."""

    def test_round_trip(self, tmp_path):
        """Everything comes back; others can read the tensors by name; nothing partial is left."""
        path = tmp_path / "b.safetensors"
        episodes = [episode(trajectory(), uid="é"), episode(forked(), status=Status.FAILED), episode()]
        batch = batch_of(*episodes, prompt_length=5, response_length=7)
        save_batch(batch, path)
        assert_same_batches(batch, load_batch(path))
        assert torch.equal(batch.packed().input_ids, load_file(path)["input_ids"])
        tight = load_batch(path, pad_to_multiple_of=4)
        assert (tight.prompt_length, tight.response_length) == (4, 4)
        assert [each.name for each in tmp_path.iterdir()] == ["b.safetensors"]

    @settings(max_examples=30, deadline=None)
    @given(episodes=RESULTS)
    def test_any_batch(self, tmp_path_factory, episodes):
        """Packed or padded, a batch comes back from its file; one of no rows too."""
        path = tmp_path_factory.getbasetemp() / "any.safetensors"
        batch = batch_of(*episodes)
        for saved in (batch, batch.packed()):
            save_batch(saved, path)
            assert_same_batches(batch, load_batch(path))
            packed = load_packed_batch(path)
            assert all(torch.equal(getattr(batch.packed(), name), getattr(packed, name)) for name in PACKED)

    @given(episodes=RESULTS)
    def test_arrays(self, tmp_path_factory, episodes):
        """A batch that is written without torch has the same bytes."""
        folder = tmp_path_factory.mktemp("arrays")
        widths = {"prompt_length": 16, "response_length": None}
        save_batch(collate_packed(episodes, pad_token_id=PAD), folder / "tensors", **widths)
        save_arrays(pack_arrays(episodes), folder / "arrays", pad_token_id=PAD, **widths)
        assert (folder / "tensors").read_bytes() == (folder / "arrays").read_bytes()

    @pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
    def test_permissions(self, tmp_path, umask):
        """The umask decides who may read a batch, as with the other results."""
        before = os.umask(umask)
        try:
            save_batch(batch_of(episode()), tmp_path / "b.safetensors")
            (tmp_path / "other").touch()
        finally:
            os.umask(before)
        modes = {oct(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert modes == {oct(0o100666 & ~umask)}

    @pytest.mark.parametrize("records", [[], [trajectory()], [trajectory(), forked(), Trajectory([])]])
    def test_a_file_of_version_1(self, tmp_path, records):
        """Its columns of response tokens have entries for prompts, and it has positions without any block too."""
        path = tmp_path / "b.safetensors"
        batch = batch_of(*(episode(record) for record in records))
        packed = batch.packed()
        save_batch(batch, path)
        with safe_open(path, framework="pt") as file:
            metadata, tensors = json.loads(file.metadata()["turnwise.packed_batch"]), load_file(path)
        assert 2 == metadata.pop("version")
        columns = {name: column.alignment for name, column in COLUMNS.items()} | metadata["field_alignment"]
        for name in (each for each, alignment in columns.items() if alignment == "response"):
            rows = zip(packed.split(tensors[name]), packed.prompt_lens.tolist(), strict=True)
            parts = [torch.cat([row.new_zeros((num_prompt, *row.shape[1:])), row]) for row, num_prompt in rows]
            tensors[name] = torch.cat(parts) if parts else tensors[name]
        save_file(
            tensors | {"position_ids": packed.position_ids}, path, {"turnwise.packed_batch": json.dumps(metadata)}
        )
        assert_same_batches(batch, load_batch(path))

    def test_metrics(self, tmp_path):
        """A file keeps the metrics of its rows."""
        metrics = EpisodeMetrics(extra={"programs_passed": np.float32(2)})
        save_batch(batch_of(episode(trajectory(), metrics=metrics)), tmp_path / "b.safetensors")
        assert load_batch(tmp_path / "b.safetensors").rows[0].metrics == {"programs_passed": 2.0}

    @pytest.mark.parametrize("num_short", [50, 200])
    def test_size(self, tmp_path, num_short):
        """One long episode among short ones costs its own tokens, in the file and in the memory that writes it."""
        path, short, longest = tmp_path / "b.safetensors", Trajectory([1] * 10), Trajectory([1] * 10)
        short.add_action([2] * 20, [-0.5] * 20)
        longest.add_action([2] * 8000, [-0.5] * 8000)
        batch = collate_packed([*(episode(short) for _ in range(num_short)), episode(longest)], pad_token_id=PAD)
        num_tokens = 30 * num_short + 8010
        save_batch(batch, path)  # imports torch's part of it

        tracemalloc.start()
        try:
            save_batch(batch, path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert 17 * num_tokens < path.stat().st_size < 18 * num_tokens + 300 * len(batch) + 2000
        assert peak < 100 * num_tokens + 3000 * len(batch) + 50_000
        loaded = load_packed_batch(path)
        assert sum(each.untyped_storage().nbytes() for each in loaded.tensors.values()) < 22 * num_tokens

    def test_other_files(self, tmp_path):
        """A missing file, bytes that are no such file, and tensors without our metadata."""
        path = tmp_path / "b.safetensors"
        with pytest.raises(DataError, match=r"b.safetensors: no such file$"):
            load_batch(path)
        path.write_bytes(b"nothing")
        with pytest.raises(DataError, match=r"b.safetensors: not a saved batch: SafetensorError: "):
            load_batch(path)
        save_file({"input_ids": torch.zeros(1, 2)}, path)
        with pytest.raises(DataError, match=r"not a saved batch: KeyError: 'turnwise.packed_batch'$"):
            load_batch(path)

    @given(data=st.data())
    def test_a_changed_byte(self, tmp_path_factory, data):
        """A file with one wrong byte gives a batch or one of our errors, wherever the byte is."""
        path = tmp_path_factory.getbasetemp() / "changed.safetensors"
        save_batch(collate([episode(trajectory()), episode(forked())], pad_token_id=PAD), path)
        saved = bytearray(path.read_bytes())
        saved[data.draw(st.integers(0, len(saved) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(saved)
        try:
            assert 2 >= len(load_batch(path))
        except TurnwiseError as error:
            event(type(error).__name__)

    def test_tampered_metadata(self, tmp_path):
        """Rows that do not fit the tensors, or have a status that is none, are refused."""
        path = tmp_path / "b.safetensors"
        packed = collate_packed([episode(trajectory())], pad_token_id=PAD)
        rows = {name: packed.column(name) for name in ROW_NAMES}
        tensors = {name: getattr(packed, name).contiguous() for name in PACKED if name != "position_ids"}
        good = {"version": 2, "widths": {}, "pad_token_id": 0, "num_rows": 1, "rows": rows, "field_alignment": {}}

        def load(change, **wrong):
            save_file(tensors | wrong, path, {"turnwise.packed_batch": json.dumps(good | change)})
            return load_batch(path)

        assert 1 == len(load({}))
        with pytest.raises(DataError, match="not a saved batch: ValueError: 'fine' is not a valid Status"):
            load({"rows": rows | {"status": ["fine"]}})
        with pytest.raises(DataError, match=r"not a saved batch: TrajectoryError: response_mask has shape \[2\]"):
            load({}, response_mask=torch.zeros(2, dtype=torch.uint8))
        with pytest.raises(
            DataError, match="not a saved batch: ValueError: the file has version 3, this turnwise reads"
        ):
            load({"version": 3})
        with pytest.raises(DataError, match="TrajectoryError: cu_seqlens does not bound 1 rows of 6 tokens"):
            load({}, cu_seqlens=torch.tensor([0, 7], dtype=torch.int32))
        with pytest.raises(TrajectoryError, match="row 0 has 4 response tokens"):
            load({"widths": {"response_length": 3}})


TYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
WRONG = [
    *[("input_ids", -1), ("position_ids", -1), ("block_start", -1), ("path_start", -1)],
    *[("response_mask", 2), ("loss_mask", 2), ("weight_versions", -2), ("num_turns", -1), ("prompt_lens", -1)],
    *[("rollout_log_probs", value) for value in (float("nan"), float("inf"), float("-inf"))],
]


@pytest.mark.parametrize("load", [load_batch, load_packed_batch])
class TestChangedFiles:
    """A file in which another program has changed a column is refused, and the error names the column."""

    def change(self, path, name, change):
        """Write a batch of one row, of which one column is changed."""
        save_batch(collate_packed([episode(trajectory())], pad_token_id=PAD), path)
        with safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata(), {each: file.get_tensor(each) for each in list(file.keys())}
        tensors.setdefault("position_ids", torch.arange(6, dtype=torch.int32))
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
