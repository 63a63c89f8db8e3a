"""Pictures from a file of tasks to the files of results, by the command line, with real processors and no model."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from picture_rollouts import CAT, DOG, roll_out, start_roll_out, write_run

from turnwise.media import Picture
from turnwise_result_files import load_packed_batch, read_results

pytestmark = pytest.mark.usefixtures("starts_a_process")


def fail(folder: Path, **options) -> str:
    """Return the last line of a run that is refused before its first episode."""
    done = roll_out(folder, write_run(folder, **options))
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    assert not (folder / "out" / "trajectories.parquet").exists()
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_run_of_the_command_line(tmp_path):
    """The engine gets each picture at its placeholders, and the results hold each once, bytes unchanged."""
    done = roll_out(tmp_path, write_run(tmp_path))
    assert done.returncode == 0, done.stderr
    media = tmp_path / "out" / "media"
    assert sorted([CAT.file_name, DOG.file_name]) == sorted(file.name for file in media.iterdir())
    assert [CAT.data, DOG.data] == [(media / each.file_name).read_bytes() for each in (CAT, DOG)]
    results = read_results(tmp_path / "out")
    assert ["completed"] * 4 == [str(each.status) for each in results]
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    for result in results:
        (record,) = result.trajectories
        places = [(p.start, p.num_tokens, p.picture.key) for p in record.pictures]
        assert [CAT.key, DOG.key] == [key for _start, _num, key in places]
        pad = int(record.input_ids[record.pictures[0].start])
        assert all((record.input_ids[p.start : p.stop] == pad).all() for p in record.pictures)
        last = next(each for each in requests if len(each["places"]) == 2)
        assert [list(place) for place in places] == last["places"]
        assert record.input_ids[: len(last["ids"])].tolist() == last["ids"]
        kinds = [part["type"] for part in result.messages[2]["content"]]
        assert kinds == ["text", "image_url"]
    for row, result in zip(load_packed_batch(tmp_path / "out" / "batch.safetensors").rows, results, strict=True):
        assert [p.picture.key for p in row.pictures] == [p.picture.key for p in result.trajectories[0].pictures]


@pytest.mark.slow
def test_a_resumed_run_knows_its_tasks_again(tmp_path):
    """Its files have references, and the tasks the bytes; a changed picture is a changed task."""
    file = write_run(tmp_path)
    assert roll_out(tmp_path, file).returncode == 0
    assert roll_out(tmp_path, "", "--resume", str(tmp_path / "out")).returncode == 0
    (tmp_path / "images" / "cat.png").write_bytes(DOG.data)
    done = roll_out(tmp_path, "", "--resume", str(tmp_path / "out"))
    assert done.returncode != 0
    assert "row 0 has changed since episode" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_run_that_ends_between_two_pictures_is_continued(tmp_path, end):
    """Its records are those of a run that was left alone: interrupted episodes go on, and killed ones start again."""
    folders = [tmp_path / name for name in ("whole", "ended")]
    for folder in folders:
        folder.mkdir()
    whole, ended = folders
    assert roll_out(whole, write_run(whole)).returncode == 0
    waits = ended / "waits"
    file = write_run(ended, engine={"name": "seeing", "log": str(ended / "requests.jsonl"), "waits": str(waits)})
    with start_roll_out(ended, file) as process:
        while not waits.exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(end)
        process.communicate(timeout=120)
    assert roll_out(ended, "", "--resume", str(ended / "out")).returncode == 0
    records = [
        sorted(
            (result.uid, record.input_ids.tolist(), [(p.start, p.num_tokens, p.picture.key) for p in record.pictures])
            for result in read_results(folder / "out")
            for record in result.trajectories
        )
        for folder in folders
    ]
    assert 4 == len(records[0])
    assert records[0] == records[1]
    media = [{file.name: file.read_bytes() for file in (folder / "out" / "media").iterdir()} for folder in folders]
    assert media[0] == media[1]
    prompts = [json.loads(line) for line in (ended / "requests.jsonl").read_text().splitlines()]
    first_turns = sum(1 for each in prompts if len(each["places"]) == 1)
    assert (first_turns == 4) == (end == signal.SIGINT)


@pytest.mark.slow
def test_single_turns_show_pictures(tmp_path):
    """The agent without tools takes them as well."""
    done = roll_out(tmp_path, write_run(tmp_path, agent="single_turn", tools=[], parser=None))
    assert done.returncode == 0, done.stderr
    assert [[CAT.key]] * 4 == [
        [p.picture.key for p in r.trajectories[0].pictures] for r in read_results(tmp_path / "out")
    ]


@pytest.mark.slow
def test_an_engine_without_pictures(tmp_path):
    """The run is refused before its first episode."""
    assert "row 0 (task 'task0') has pictures, which need" in fail(
        tmp_path, engine={"name": "seeing", "pictures": False}
    )


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_on_ray(tmp_path):
    """Two workers and two replicas give the records of a run in one process, and files with the same pictures."""
    here, ray = tmp_path / "here", tmp_path / "ray"
    for folder, words in ((here, ()), (ray, ("runtime=ray", "runtime.num_workers=2", "runtime.num_replicas=2"))):
        folder.mkdir()
        done = roll_out(folder, write_run(folder), *words)
        assert done.returncode == 0, done.stderr
    records = [
        {
            (result.uid, record.input_ids.tobytes(), *[(p.start, p.picture.data) for p in record.pictures])
            for result in read_results(folder / "out")
            for record in result.trajectories
        }
        for folder in (here, ray)
    ]
    assert 4 == len(records[0])
    assert records[0] == records[1]
    messages = [{each.uid: each.messages for each in read_results(folder / "out")} for folder in (here, ray)]
    assert messages[0] == messages[1]
    seen = [sorted((folder / "requests.jsonl").read_text().splitlines()) for folder in (here, ray)]
    assert seen[0] == seen[1]
    assert {CAT.file_name, DOG.file_name} == {file.name for file in (ray / "out" / "media").iterdir()}


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_replica_gets_its_pictures_again(tmp_path):
    """The only replica dies with a request and all pictures, and the process that replaces it asks for them."""
    log, died = tmp_path / "requests.jsonl", tmp_path / "died"
    engine = {"name": "seeing", "log": str(log), "dies": str(died)}
    done = roll_out(tmp_path, write_run(tmp_path, engine=engine), "runtime=ray", "runtime.num_replicas=1")
    assert done.returncode == 0, done.stderr
    assert died.exists()
    results = read_results(tmp_path / "out")
    assert ["completed"] * 4 == [str(each.status) for each in results]
    for result in results:
        (record,) = result.trajectories
        places = [[p.start, p.num_tokens, p.picture.key] for p in record.pictures]
        assert [CAT.key, DOG.key] == [key for _start, _num, key in places]
        assert any(json.loads(line)["places"] == places for line in log.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.ray
def test_an_engine_without_pictures_on_ray(tmp_path):
    """The replicas say so, before the first episode."""
    options = {"engine": {"name": "seeing", "pictures": False}, "runtime": {"name": "ray"}}
    assert "row 0 (task 'task0') has pictures, which need an engine" in fail(tmp_path, **options)


@pytest.mark.slow
def test_a_model_without_pictures(tmp_path):
    """So is one whose model takes none."""
    file = write_run(tmp_path)
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    done = roll_out(tmp_path, file)
    assert done.returncode != 0
    assert "the model takes no pictures" in done.stderr


@pytest.mark.slow
def test_a_broken_picture_of_a_task(tmp_path):
    """The line names the row."""
    broken = Picture(data=CAT.data[:50], media_type="image/png")
    line = fail(tmp_path, picture=broken)
    assert "row 0 (task 'task0'): picture" in line
    assert "is broken" in line


@pytest.mark.slow
def test_a_broken_picture_of_a_tool(tmp_path):
    """The tool is at fault, and other episodes go on."""
    file = write_run(tmp_path)
    (tmp_path / "dog.jpg").write_bytes(DOG.data[:100])
    done = roll_out(tmp_path, file)
    assert "Traceback" not in done.stderr
    faults = [each.fault for each in read_results(tmp_path / "out")]
    assert {("tool", "ToolError")} == {(fault.owner, fault.kind) for fault in faults if fault}
    assert all("is broken" in fault.message for fault in faults if fault)


@pytest.mark.slow
def test_the_number_of_pictures(tmp_path):
    """An observation with one more ends its episode at the limit, which its result names."""
    done = roll_out(tmp_path, write_run(tmp_path), "rollout.max_pictures=1")
    assert done.returncode == 0, done.stderr
    for result in read_results(tmp_path / "out"):
        assert (str(result.status), result.limit.name, result.limit.value) == ("truncated", "rollout.max_pictures", 1)
        assert result.limit.reason == "the observation would give the record 2 pictures, more than 1"
        assert [CAT.key] == [p.picture.key for p in result.trajectories[0].pictures]


def test_a_missing_picture_of_a_task(tmp_path):
    """One line names the file, the row and the part."""
    file = write_run(tmp_path)
    (tmp_path / "images" / "cat.png").unlink()
    done = roll_out(tmp_path, file)
    assert done.returncode != 0
    line = done.stderr.strip().splitlines()[-1]
    assert "data.jsonl, line 1: messages[0].content[1]: the picture 'images/cat.png' cannot be read" in line


@pytest.mark.slow
def test_a_run_of_text_has_no_media(tmp_path):
    """A run without pictures in its tasks has no folder of them."""
    file = write_run(tmp_path, tools=[], parser=None, agent="single_turn")
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}))
    assert roll_out(tmp_path, file).returncode == 0
    assert not (tmp_path / "out" / "media").exists()
