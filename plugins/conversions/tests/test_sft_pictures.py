"""Conversations and records with pictures as rows of SFT: exact ids and masks, and the pictures by reference."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, Trajectory
from turnwise.cli import main
from turnwise.errors import DataError
from turnwise.media import picture_part
from turnwise.protocols import ModelSpec
from turnwise.record.lineage import RecordLineage
from turnwise.types import MediaTokens, PlacedPicture, TrajectoryScore
from turnwise_calculator_demo import model_dir
from turnwise_chat_templates import load_chat
from turnwise_conversions import encode_demonstration
from turnwise_conversions.sft_file import rows_of_records
from turnwise_result_files import TrajectoryWriter
from turnwise_testing.inputs.vision import make_picture, save_qwen

CAT, DOG, TALL = make_picture(20, 30, "red"), make_picture(50, 20, "blue", "JPEG"), make_picture(8, 64, "green")
CALL = {"id": "c", "type": "function", "function": {"name": "camera", "arguments": "{}"}}
ANSWER = {"role": "assistant", "content": "A cat."}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a small Qwen3-VL without weights."""
    return save_qwen(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chat(model):
    """Its chat."""
    return load_chat(ModelSpec(path=model))


def shown(text, *pictures):
    """Return a content."""
    return [{"type": "text", "text": text}, *map(picture_part, pictures)]


CONTENTS = st.builds(shown, st.sampled_from(["Which?", "Seen:"]), *[st.sampled_from([CAT, DOG, TALL])] * 2) | st.just(
    "Go"
)
"""Two pictures, or a text."""


@given(
    contents=st.lists(st.tuples(st.sampled_from(["user", "tool"]), CONTENTS), min_size=1, max_size=3), first=CONTENTS
)
def test_a_sampled_conversation_is_its_own_demonstration(chat, contents, first):
    """Ids, mask and places of pictures are those of the record of an episode, which an agent appends."""
    messages = [{"role": "user", "content": first}]
    record = Trajectory(chat.picture_prompt(messages))
    turn = [*chat.tokenizer.encode("Yes."), chat.stop_token_ids[0]]
    for role, content in [*contents, ("", None)]:
        messages.append({"role": "assistant", "content": "Yes."})
        record.add_action(turn, [-0.5] * len(turn))
        if content is not None:
            new = [{"role": role, "content": content, "tool_call_id": "0", "name": "f"}]
            record.add_observation(chat.picture_delta(new, turn[-1], with_tools=False))
            messages += new

    made = encode_demonstration(chat, messages)

    assert made.input_ids.tolist() == record.input_ids.tolist()
    assert made.loss_mask[record.num_prompt_tokens :].tolist() == record.response_mask.astype(bool).tolist()
    assert not made.loss_mask[: record.num_prompt_tokens].any()
    assert places_of(made.pictures) == places_of(record.pictures)
    (row,) = rows_of_records(episode(record))
    assert row.input_ids.tolist() == made.input_ids.tolist()
    assert np.array_equal(row.loss_mask, made.loss_mask)
    assert places_of(row.pictures) == places_of(made.pictures)


def places_of(pictures):
    """Return the places and keys of pictures."""
    return [(each.start, each.num_tokens, each.picture.key) for each in pictures]


def episode(*records, uid="t0", reward=1.0, **options):
    """Return an episode with records."""
    scores = tuple(TrajectoryScore(value=reward) for _ in records)
    usual = {"status": Status.COMPLETED, "agent_name": "a", "messages": (), "trajectories": records, "scores": scores}
    return EpisodeResult(task=Task(messages=({"role": "user", "content": "Hi"},), uid=uid), **usual | options)


def test_the_command_writes_pictures_by_reference(model, chat, tmp_path):
    """A file below the folder and a `data:` URL, of a user and of a tool: their bytes are files beside the rows."""
    (tmp_path / "cat.png").write_bytes(CAT.data)
    asked = [{"type": "text", "text": "Which?"}, {"type": "image", "path": "cat.png"}]
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "name": "camera", "content": shown("Seen:", DOG)},
        ANSWER,
    ]
    text = [{"role": "user", "content": "Hi"}, ANSWER]
    lines = [{"messages": messages}, {"messages": text}]
    (tmp_path / "tune.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    out = tmp_path / "rows" / "sft.parquet"
    command = ["convert", str(tmp_path / "tune.jsonl"), "--to", "sft", "--model", str(model), "--out", str(out)]
    assert main(command) == 0

    row, other = pq.read_table(out).to_pylist()
    assert [each["file"] for each in row["pictures"]] == [f"media/{CAT.file_name}", f"media/{DOG.file_name}"]
    assert [(out.parent / each["file"]).read_bytes() for each in row["pictures"]] == [CAT.data, DOG.data]
    (pad,) = chat.tokenizer.encode("<|image_pad|>")
    inside = [place for each in row["pictures"] for place in range(each["start"], each["start"] + each["num_tokens"])]
    assert inside == [place for place, token in enumerate(row["input_ids"]) if token == pad]
    assert all(row["labels"][place] == -100 for place in inside)
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    call = '<tool_call>\n{"name": "camera", "arguments": {}}\n</tool_call>'
    assert chat.tokenizer.decode(learned) == f"{call}<|im_end|>A cat.<|im_end|>"
    assert other["pictures"] == []


def test_a_file_of_texts_has_no_column_of_pictures(model, tmp_path):
    """It is as it was, also for a model that takes pictures."""
    line = {"messages": [{"role": "user", "content": "Hi"}, ANSWER]}
    (tmp_path / "tune.jsonl").write_text(json.dumps(line), encoding="utf-8")
    out = tmp_path / "sft.parquet"
    assert main(["convert", str(tmp_path / "tune.jsonl"), "--to", "sft", "--model", str(model), "--out", str(out)]) == 0
    assert pq.read_table(out).column_names == ["input_ids", "loss_mask", "labels"]
    assert not (tmp_path / "media").exists()


REFUSED = {
    "a model of texts": ([{"role": "user", "content": shown("Which?", CAT)}, ANSWER], "the model takes no pictures"),
    "a picture of a turn": (
        [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": shown("Here:", CAT)}],
        "line 1: message 1 is a turn of the assistant with a picture",
    ),
    "a broken picture": (
        [{"role": "user", "content": [{"type": "image", "path": "broken.png"}]}, ANSWER],
        "line 1: picture .* is broken",
    ),
    "a missing picture": (
        [{"role": "user", "content": [{"type": "image", "path": "none.png"}]}, ANSWER],
        "the picture 'none.png' cannot be read",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_conversations_are_refused(model, tmp_path, capsys, name):
    """With one line, and no file is left."""
    messages, reason = REFUSED[name]
    (tmp_path / "broken.png").write_bytes(CAT.data[:60])
    (tmp_path / "tune.jsonl").write_text(json.dumps({"messages": messages}), encoding="utf-8")
    chosen = model_dir() if name == "a model of texts" else model
    out = tmp_path / "sft.parquet"
    command = ["convert", str(tmp_path / "tune.jsonl"), "--to", "sft", "--model", str(chosen), "--out", str(out)]
    assert main(command) == 2
    errors = capsys.readouterr().err
    assert re.search(reason, errors)
    assert errors.count("\n") == 1
    assert not out.exists()


def recorded(*, pictures=(CAT,)):
    """Return a record with a picture of two tokens, a turn, an observation with another and a turn."""
    placed = [PlacedPicture(start=1, num_tokens=2, picture=each) for each in pictures]
    record = Trajectory(MediaTokens(token_ids=[1, 2, 2, 3], pictures=placed))
    record.add_action([7, 8], [-0.5, -0.5])
    record.add_observation(
        MediaTokens(token_ids=[4, 2, 2], pictures=[PlacedPicture(start=1, num_tokens=2, picture=DOG)])
    )
    record.add_action([9], [-0.5])
    return record


def write_run(folder, *results):
    """Write the folder of a rollout."""
    with TrajectoryWriter(folder / "run" / "trajectories.parquet") as writer:
        for each in results:
            writer.write(each)
    return folder / "run"


def test_a_run_is_written_as_it_was_recorded(tmp_path, capsys):
    """Sampled ids are learned; episodes with a lower reward, failed ones and untrained records have no row."""
    aside = evolve(episode(recorded(), uid="t3"), lineage=(RecordLineage(trained=False),))
    run = write_run(
        tmp_path,
        episode(recorded()),
        episode(recorded(), uid="t1", reward=0.0),
        episode(recorded(), uid="t2", status=Status.FAILED),
        aside,
    )
    out = tmp_path / "elsewhere" / "sft.parquet"
    assert main(["convert", str(run), "--to", "sft", "--min-reward", "1", "--out", str(out)]) == 0
    assert "1 of 4 written as sft" in capsys.readouterr().err
    (row,) = pq.read_table(out).to_pylist()
    assert row["input_ids"] == [1, 2, 2, 3, 7, 8, 4, 2, 2, 9]
    assert row["loss_mask"] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert row["labels"] == [-100] * 4 + [7, 8] + [-100] * 3 + [9]
    assert [(each["start"], each["num_tokens"]) for each in row["pictures"]] == [(1, 2), (7, 2)]
    assert [(out.parent / each["file"]).read_bytes() for each in row["pictures"]] == [CAT.data, DOG.data]


def test_a_run_needs_no_options_of_conversations(tmp_path, capsys):
    """Its tokens are those of its model; and a run without a row is no file."""
    run, out = write_run(tmp_path, episode(recorded(), reward=0.0)), tmp_path / "sft.parquet"
    command = ["convert", str(run), "--to", "sft", "--out", str(out)]
    for option in (["--model", "m"], ["--config", "run.yaml"], ["--revision", "main"]):
        assert main([*command, *option]) == 2
        assert f"{option[0]} is for conversations" in capsys.readouterr().err
    assert main([*command, "--min-reward", "1"]) == 2
    assert "no episode has a token to learn" in capsys.readouterr().err
    assert not out.exists()


def test_parallel_paths_are_refused():
    """A row has one path."""
    record = Trajectory([1])
    paths = record.fork(2)
    for path in paths:
        path.add_action([7], [-0.5])
    record.join(paths)
    with pytest.raises(DataError, match="episode t0/0 has parallel paths"):
        rows_of_records(episode(record))
