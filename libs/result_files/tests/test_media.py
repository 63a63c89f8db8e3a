"""Pictures in files of results: each once in `media`, references elsewhere, and files without pictures as before."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from attrs import evolve

from turnwise.batch.packed_arrays import pack_arrays
from turnwise.errors import DataError
from turnwise.media import find_picture, picture_part
from turnwise.record.lineage import EpisodeRecord
from turnwise.record.pictures import places
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.step_results import RecordedCall
from turnwise.record.trajectory import Trajectory
from turnwise.types import MediaTokens, PlacedPicture, ToolCall, ToolResult
from turnwise_result_files import TrajectoryWriter, load_packed_batch, load_unfinished, read_results, save_unfinished
from turnwise_result_files.batch_file import save_arrays
from turnwise_testing.inputs.small_episodes import episode, trajectory

CAT = find_picture(b"\x89PNG\r\n\x1a\n cat", "image/png")
DOG = find_picture(b"\xff\xd8\xff dog", "image/jpeg")
ASKED = {"role": "user", "content": [{"type": "text", "text": "Which animal?"}, picture_part(CAT)]}


def record() -> Trajectory:
    """Return a record with a cat in its prompt, and a dog and the cat in an observation."""
    prompt = MediaTokens(token_ids=np.arange(5), pictures=[PlacedPicture(start=1, num_tokens=3, picture=CAT)])
    made = Trajectory(prompt)
    made.add_action([7], [-0.5])
    seen = [PlacedPicture(start=0, num_tokens=2, picture=DOG), PlacedPicture(start=2, num_tokens=1, picture=CAT)]
    made.add_observation(MediaTokens(token_ids=np.arange(4), pictures=seen))
    return made


def seen_episode(uid="t0"):
    """Return an episode whose task, conversation and record have pictures."""
    made = episode(record(), uid=uid)
    answer = {"role": "tool", "content": [picture_part(DOG), picture_part(CAT)]}
    return evolve(made, task=evolve(made.task, messages=(ASKED,)), messages=(ASKED, answer))


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "media").iterdir())


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_episodes_come_back_with_their_pictures(tmp_path, suffix):
    """The bytes are in one file for each picture, and neither messages nor rows hold them."""
    path = tmp_path / f"t.{suffix}"
    with TrajectoryWriter(path) as writer:
        writer.write(seen_episode())
        writer.write(seen_episode("t1"))
        writer.write(episode(trajectory(), uid="t2"))
    assert sorted([CAT.file_name, DOG.file_name]) == names_in(tmp_path)
    assert CAT.data == (tmp_path / "media" / CAT.file_name).read_bytes()
    assert b"base64," not in path.read_bytes()
    first, second, third = read_results(path)
    for result in (first, second):
        assert (ASKED,) == result.task.messages
        assert list(seen_episode().messages) == list(result.messages)
        (read,) = result.trajectories
        assert places(record().pictures) == places(read.pictures)
        assert [CAT, DOG, CAT] == [each.picture for each in read.pictures]
        assert read.pictures[0].picture is CAT
    assert () == third.trajectories[0].pictures


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_files_without_pictures_have_no_trace_of_them(tmp_path, suffix):
    """Neither a folder nor a column."""
    path = tmp_path / f"t.{suffix}"
    with TrajectoryWriter(path) as writer:
        writer.write(episode(trajectory()))
    assert not (tmp_path / "media").exists()
    if suffix == "parquet":
        assert [None] == pq.read_table(path)["open_columns"].to_pylist()
    else:
        assert "picture" not in path.read_text()


def test_a_picture_is_written_once(tmp_path):
    """A later writer leaves the file of an earlier one alone."""
    with TrajectoryWriter(tmp_path / "a.jsonl") as writer:
        writer.write(seen_episode())
    before = (tmp_path / "media" / CAT.file_name).stat().st_mtime_ns
    with TrajectoryWriter(tmp_path / "b.jsonl") as writer:
        writer.write(seen_episode())
    assert before == (tmp_path / "media" / CAT.file_name).stat().st_mtime_ns


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_damaged_pictures_are_refused(tmp_path, damage):
    """The error names the file of the picture."""
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write(seen_episode())
    file = tmp_path / "media" / CAT.file_name
    file.unlink() if damage == "missing" else file.write_bytes(b"\x89PNG\r\n\x1a\n fox")
    with pytest.raises(DataError, match=f"{CAT.key}.*{'cannot be read' if damage == 'missing' else 'has changed'}"):
        read_results(path)


def test_references_do_not_leave_the_folder(tmp_path):
    """A reference in an edited file is a name of content and nothing else."""
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write(seen_episode())
    row = json.loads(path.read_text())
    row["open_columns"][0]["values"] = json.dumps([[1, 3, "media/../../secret.png"]])
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="is no reference to a picture"):
        read_results(path)


def test_unfinished_episodes_keep_their_pictures(tmp_path):
    """Also those of an open path, of the messages, and of a call that has ended."""
    made = record()
    (path_record,) = made.fork(1)
    path_record.add_observation(
        MediaTokens(token_ids=[1, 2], pictures=[PlacedPicture(start=0, num_tokens=2, picture=DOG)])
    )
    task = evolve(episode(trajectory()).task, messages=(ASKED,))
    call = RecordedCall(call=ToolCall(name="look"), result=ToolResult(text="a dog", pictures=(DOG,)))
    unfinished = UnfinishedEpisode(
        spec=EpisodeSpec(task=task, agent_name="a"), messages=(ASKED,), records=(EpisodeRecord(made),), calls=(call,)
    )
    save_unfinished(tmp_path / "u.jsonl", [unfinished])
    assert "base64," not in (tmp_path / "u.jsonl").read_text()
    (again,) = load_unfinished(tmp_path / "u.jsonl")
    assert ((ASKED,), (ASKED,)) == (again.messages, again.spec.task.messages)
    (restored,) = again.records
    assert places(made.pictures) == places(restored.trajectory.pictures)
    assert places(path_record.pictures) == places(restored.trajectory.open_paths[0].pictures)
    assert (DOG,) == again.calls[0].result.pictures


def test_calls_without_pictures_are_written_as_before(tmp_path):
    """The file has no key of pictures."""
    call = RecordedCall(call=ToolCall(name="look"), result=ToolResult(text="nothing"))
    spec = EpisodeSpec(task=episode(trajectory()).task, agent_name="a")
    save_unfinished(tmp_path / "u.jsonl", [UnfinishedEpisode(spec=spec, calls=(call,))])
    assert "picture" not in (tmp_path / "u.jsonl").read_text()


def test_batches_keep_the_places_of_pictures(tmp_path):
    """Rows of a batch file have the pictures of their records."""
    arrays = pack_arrays([seen_episode(), episode(trajectory(), uid="t1")])
    save_arrays(arrays, tmp_path / "batch.safetensors", pad_token_id=0)
    batch = load_packed_batch(tmp_path / "batch.safetensors")
    assert places(record().pictures) == places(batch.rows[0].pictures)
    assert () == batch.rows[1].pictures
