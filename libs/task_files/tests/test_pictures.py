"""Pictures in rows of files: their bytes in the messages of tasks, and one line for each that cannot be read."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnwise.errors import DataError
from turnwise.media import find_picture, picture_part, read_picture_part
from turnwise_task_files import read_tasks
from turnwise_task_files.rows import task_from_row

CAT = find_picture(b"\x89PNG\r\n\x1a\n cat", "image/png")
TEXT = {"type": "text", "text": "Which animal?"}


def write(folder, *parts):
    """Write a picture and a data set of one row beside it."""
    (folder / "images").mkdir()
    (folder / "images" / "cat.png").write_bytes(CAT.data)
    file = folder / "data.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": list(parts)}]}))
    return file


def test_files_beside_the_data_set(tmp_path):
    """A path becomes the bytes of its file, and the task is the same wherever the folder lies."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    part = {"type": "image", "path": "images/cat.png"}
    (task,), (moved,) = (read_tasks(write(tmp_path / name, TEXT, part)) for name in ("one", "other"))
    assert task.messages[0]["content"] == [TEXT, picture_part(CAT)]
    assert read_picture_part(task.messages[0]["content"][1]) is CAT
    assert task == moved


def test_urls_get_one_form(tmp_path):
    """A URL alone, and with other parameters, becomes the form of OpenAI's messages."""
    url = picture_part(CAT)["image_url"]["url"]
    (task,) = read_tasks(write(tmp_path, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}))
    assert task.messages[0]["content"] == [picture_part(CAT)]
    assert task_from_row({"messages": task.messages}).messages == task.messages


def test_parquet(tmp_path):
    """Rows of Parquet have the keys of all parts."""
    write(tmp_path)
    parts = [TEXT | {"path": None}, {"type": "image", "text": None, "path": "images/cat.png"}]
    table = pa.Table.from_pylist([{"messages": [{"role": "user", "content": parts}]}])
    pq.write_table(table, tmp_path / "data.parquet")
    (task,) = read_tasks(tmp_path / "data.parquet")
    assert task.messages[0]["content"] == [TEXT, picture_part(CAT)]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image", "path": "images/none.png"}, "'images/none.png' cannot be read: No such file"),
        ({"type": "image", "path": "images"}, "'images' cannot be read: Is a directory"),
        ({"type": "image", "path": "../secret.png"}, "must be a path below the folder of the data set"),
        ({"type": "image", "path": "/etc/hostname"}, "must be a path below the folder of the data set"),
        ({"type": "image", "path": "https://example.com/cat.png"}, "must be a path below the folder"),
        ({"type": "image", "path": "data.jsonl"}, "'data.jsonl' is of no known type"),
        ({"type": "image"}, "a picture needs the form"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}, "none is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "is no base64"),
    ],
)
def test_pictures_that_are_refused(tmp_path, part, reason):
    """One line names the file, the row and the part."""
    with pytest.raises(DataError, match=r"data.jsonl, line 1: messages\[0\].content\[1\]: ") as caught:
        read_tasks(write(tmp_path, TEXT, part))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_large_files(tmp_path, monkeypatch):
    """A file is refused before it is read."""
    monkeypatch.setattr("turnwise_task_files.pictures.MAX_PICTURE_BYTES", 8)
    with pytest.raises(DataError, match=r"'images/cat\.png' has 12 bytes, more than 8"):
        read_tasks(write(tmp_path, {"type": "image", "path": "images/cat.png"}))


def test_rows_in_no_file(tmp_path):
    """A path has no folder there."""
    row = {"messages": [{"role": "user", "content": [{"type": "image", "path": "cat.png"}]}]}
    with pytest.raises(DataError, match=r"'cat\.png' is beside no file"):
        task_from_row(row)
