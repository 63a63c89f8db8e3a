"""Episodes with pictures in the forms that have a place for them, and back; and the forms that refuse them."""

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from turnwise import EpisodeResult, Status, Task, Trajectory
from turnwise.cli import main
from turnwise.errors import DataError
from turnwise.media import picture_part, read_picture_part
from turnwise.types import MediaTokens, PlacedPicture
from turnwise_conversions import to_atif, to_chat
from turnwise_result_files import TrajectoryWriter
from turnwise_testing.inputs.vision import make_picture

CAT, DOG = make_picture(20, 30, "red"), make_picture(50, 20, "blue", "JPEG")
ASKED = {"role": "user", "content": [{"type": "text", "text": "Which?"}, picture_part(CAT), picture_part(DOG)]}
ANSWER = {"role": "assistant", "content": "A cat."}
CALL = {"id": "c", "type": "function", "function": {"name": "camera", "arguments": "{}"}}
SEEN = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Seen:"}, picture_part(DOG)]}
LOOKS = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def episode(*messages, asked=ASKED, uid="t0", pictures=(CAT, DOG)):
    """Return an episode with a task and the messages behind it; its record has pictures of two tokens each."""
    placed = [PlacedPicture(start=2 * place, num_tokens=2, picture=each) for place, each in enumerate(pictures)]
    record = Trajectory(MediaTokens(token_ids=np.arange(2 * len(placed) + 1), pictures=placed))
    record.add_action([7], [-0.5])
    task = Task(messages=(asked,), uid=uid)
    return EpisodeResult(
        task=task, status=Status.COMPLETED, messages=(asked, *messages), trajectories=(record,), agent_name="a"
    )


PLAIN = episode(ANSWER)
WITH_TOOL = episode(LOOKS, SEEN, ANSWER, uid="t1")
TEXT = episode(ANSWER, asked={"role": "user", "content": "Hi"}, uid="t2", pictures=())


def write(folder: Path, *results: EpisodeResult) -> Path:
    """Write the folder of a rollout."""
    with TrajectoryWriter(folder / "run" / "trajectories.parquet") as writer:
        for each in results:
            writer.write(each)
    return folder / "run"


def convert(folder: Path, form: str, *results: EpisodeResult) -> Path:
    out = folder / "out"
    assert main(["convert", str(write(folder, *results)), "--to", form, "--out", str(out)]) == 0
    return out


def test_openai(tmp_path):
    """Pictures of users are parts with `data:` URLs, whose bytes are those of the run; texts are as before."""
    lines = [json.loads(line) for line in convert(tmp_path, "openai", PLAIN, TEXT).read_text().splitlines()]
    text, *parts = lines[0]["messages"][0]["content"]
    assert {"type": "text", "text": "Which?"} == text
    assert [CAT.data, DOG.data] == [read_picture_part(part).data for part in parts]
    assert lines[0]["messages"][1] == ANSWER
    assert ["Hi", "A cat."] == [message["content"] for message in lines[1]["messages"]]
    assert to_chat(PLAIN) == lines[0]


def test_openai_has_no_pictures_of_tools(tmp_path, capsys):
    """OpenAI refuses such a file, so none is written."""
    command = ["convert", str(write(tmp_path, WITH_TOOL)), "--to", "openai", "--out", str(tmp_path / "out")]
    assert main(command) != 0
    assert "a message of the role tool of episode t1/0 has a picture, and this form" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_datasets(tmp_path):
    """Messages have parts, and `images` the unchanged bytes in their order, also with episodes of text beside them."""
    datasets = pytest.importorskip("datasets")
    found = datasets.load_from_disk(str(convert(tmp_path, "datasets", PLAIN, WITH_TOOL, TEXT)))
    assert [image.size for image in found[0]["images"]] == [(20, 30), (50, 20)]
    rows = found.cast_column("images", datasets.List(datasets.Image(decode=False)))
    for row, pictures in zip(rows, ([CAT, DOG], [CAT, DOG, DOG], []), strict=True):
        assert [each.data for each in pictures] == [image["bytes"] for image in row["images"]]
        parts = [part["type"] for message in row["messages"] for part in message["content"]]
        assert parts.count("image") == len(pictures)
    assert [part["text"] for part in rows[1]["messages"][2]["content"]] == ["Seen:", None]


def test_trl_reads_the_data_set(tmp_path):
    """TRL puts each picture into its part."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl.data_utils")
    (row,) = datasets.load_from_disk(str(convert(tmp_path, "datasets", PLAIN)))
    asked, answer = trl.prepare_multimodal_messages(row["messages"], images=row["images"])
    assert ["text", "image", "image"] == [part["type"] for part in asked["content"]]
    assert [(20, 30), (50, 20)] == [part["image"].size for part in asked["content"][1:]]
    assert answer["content"][0]["text"] == "A cat."


def test_a_data_set_of_texts_is_as_before(tmp_path):
    """It has no column of images, and contents are texts."""
    datasets = pytest.importorskip("datasets")
    (row,) = datasets.load_from_disk(str(convert(tmp_path, "datasets", TEXT)))
    assert "images" not in row
    assert ["Hi", "A cat."] == [message["content"] for message in row["messages"]]


def test_atif(tmp_path):
    """Contents of steps and of observations have the paths of files beside the output, with the bytes of the run."""
    out = convert(tmp_path, "atif", PLAIN, WITH_TOOL)
    plain, with_tool = (json.loads(line) for line in out.read_text().splitlines())
    assert plain["steps"][0]["message"][0] == {"type": "text", "text": "Which?"}
    sources = [part["source"] for part in plain["steps"][0]["message"][1:]]
    assert ["image/png", "image/jpeg"] == [source["media_type"] for source in sources]
    assert [CAT.data, DOG.data] == [(tmp_path / source["path"]).read_bytes() for source in sources]
    (observed,) = with_tool["steps"][1]["observation"]["results"]
    assert observed["source_call_id"] == "c"
    assert ["text", "image"] == [part["type"] for part in observed["content"]]
    assert (tmp_path / observed["content"][1]["source"]["path"]).read_bytes() == DOG.data
    assert with_tool["steps"][2]["message"] == "A cat."
    assert {CAT.file_name, DOG.file_name} == {file.name for file in (tmp_path / "media").iterdir()}


def test_atif_without_a_folder():
    """The function needs one."""
    with pytest.raises(DataError, match="episode t0/0 has pictures, and an ATIF object without a folder of files"):
        to_atif(PLAIN)


def test_atif_has_no_bitmaps(tmp_path, capsys):
    """The line names the type."""
    bitmap = make_picture(form="BMP")
    shown = {"role": "user", "content": [picture_part(bitmap)]}
    result = episode(ANSWER, asked=shown, uid="b", pictures=(bitmap,))
    command = ["convert", str(write(tmp_path, result)), "--to", "atif", "--out", str(tmp_path / "out")]
    assert main(command) != 0
    assert "episode b/0 has a picture of the type image/bmp, which ATIF does not have" in capsys.readouterr().err


def test_a_picture_of_a_record_alone():
    """A form of messages would lose it."""
    with pytest.raises(DataError, match=f"episode t0/0: no message shows the picture {CAT.key[:12]} of its record"):
        to_chat(evolve(PLAIN, messages=TEXT.messages))


def test_a_picture_in_another_form():
    """A part of a plugin is not left out."""
    odd = {"role": "user", "content": [{"type": "image", "path": "a.png"}]}
    with pytest.raises(DataError, match="episode t0/0: a picture of a message needs the form"):
        to_chat(evolve(PLAIN, messages=(odd, ANSWER)))
