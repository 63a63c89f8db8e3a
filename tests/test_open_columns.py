"""Open columns of an installed plugin: a run by the command line, its files, its batches, and a resume."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import turnwise_columns
from attrs import evolve
from turnwise_columns import ROUTES, TEACHER, TOP_K, routes, teacher, top_k

from turnwise import EpisodeResult, PluginRecipe, RolloutManager, Status, Trajectory, load_config
from turnwise.batch.packed_batch import collate_packed
from turnwise.batch.rollout_batch import RolloutBatch, collate
from turnwise.config.run import RunConfig
from turnwise.plugin.host import load
from turnwise.record.columns import is_sampled
from turnwise.record.invariants import check_trajectory
from turnwise.record.spec import UnfinishedEpisode
from turnwise_result_files import (
    TrajectoryWriter,
    from_tensordict,
    load_batch,
    load_unfinished,
    read_results,
    save_batch,
    save_unfinished,
    to_tensordict,
)
from turnwise_task_files import load_tasks
from turnwise_testing.inputs.small_episodes import assert_same_batches
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, environment_of, write_scripted_run

SOURCE = Path(__file__).with_name("turnwise_columns.py").read_text(encoding="utf-8")
AGAIN = """
import turnwise


@turnwise.hookimpl
def register_columns(registry):
    registry.add("routes", lambda _config, _resources: turnwise.ColumnSpec(name="routes", dtype="int16"))
"""
RUNTIMES = ["local", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.ray])]
NAMES = {"top_k": TOP_K, "routes": ROUTES, "teacher": TEACHER}


def write_run(folder: Path, **sections: object) -> Path:
    """Write a run with the plugin, and install it."""
    usual = {"engine": "with_columns", "agent": "wanders", "reward": "teacher"}
    file = write_scripted_run(folder, num_tasks=3, **{**usual, "plugins": [PLUGIN, "columns"], **sections})
    install_plugin(folder / SITE, "turnwise_columns", SOURCE, entry="columns")
    return file


def roll_out(folder: Path, *words: str, **sections: object) -> subprocess.CompletedProcess[str]:
    """Roll out three tasks to the folder `out`."""
    file = write_run(folder, **sections)
    command = [sys.executable, "-m", "turnwise.cli", "rollout", str(file), *words, "--out", str(folder / "out")]
    return subprocess.run(command, env=environment_of(folder), capture_output=True, text=True, check=False, timeout=300)


def same(expected: np.ndarray, actual: np.ndarray) -> bool:
    """Return whether values are equal to the bit, as those of a column."""
    return expected.astype(actual.dtype).tobytes() == actual.tobytes() and expected.shape == actual.shape


def assert_columns(record: Trajectory, *, scored: bool = True) -> None:
    """Each token has the values that the engine and the reward gave for it."""
    check_trajectory(record)
    assert dict(record.columns) == (NAMES if scored else {"top_k": TOP_K, "routes": ROUTES})
    sampled = is_sampled(record.origins)
    assert sampled.any()
    expected = np.where(sampled[:, None], top_k(record.response_ids), -1)
    assert same(expected, record.column("top_k"))
    assert same(routes(record.input_ids), record.column("routes"))
    if scored:
        assert same(teacher(record.response_ids), record.column("teacher"))


def assert_batch(batch: RolloutBatch, records: list[Trajectory]) -> None:
    """Each row has the columns of its record, and pads hold the fill."""
    assert len(batch) == len(records)
    for row, record in enumerate(records):
        real = batch.attention_mask[row].bool()
        answer = real[batch.prompt_length :]
        for name, where in (("top_k", answer), ("routes", real), ("teacher", answer)):
            field = batch.fields[name][row]
            assert same(record.column(name), field[where].numpy())
            assert NAMES[name].is_fill(field[~where].numpy()).all()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_run_of_the_command_line(runtime: str, tmp_path: Path) -> None:
    """File and batches have what the engine and the reward gave, token for token: paths, branches and cuts too."""
    done = roll_out(tmp_path, f"runtime={runtime}", "runtime.num_workers=2")

    assert done.returncode == 0, done.stderr
    results = list(read_results(tmp_path / "out"))
    assert {each.status for each in results} <= {Status.COMPLETED, Status.TRUNCATED}
    records = [record for each in results for record in each.trajectories]
    assert 12 == len(records)
    assert {True, False} == {record.has_blocks for record in records}
    for record in records:
        assert_columns(record)
        for budget in (0, 3, record.num_response_tokens - 1):
            cut = record.truncated(budget)
            assert same(record.column("top_k")[:budget], cut.column("top_k"))
    assert_batches(results, tmp_path)


def assert_batches(results: list[EpisodeResult], folder: Path) -> None:
    """Padded, packed, in a file and as a TensorDict, the columns are those of the records."""
    batch = collate(results, pad_token_id=0)
    rows = [record for each in results for record in each.trajectories]
    if len(batch) == len(rows):  # otherwise paths became rows of their own
        assert_batch(batch, rows)
    packed = collate_packed(results, pad_token_id=0)
    assert_same_batches(batch, RolloutBatch.from_packed(packed))
    assert_same_batches(batch, RolloutBatch.from_packed(batch.packed()))
    assert batch.fields["teacher"].isnan().any()  # pads
    save_batch(batch, folder / "batch.safetensors")
    assert_equal_fields(batch, load_batch(folder / "batch.safetensors"))
    assert_equal_fields(batch, from_tensordict(to_tensordict(batch)))
    wider = RolloutBatch.from_packed(from_tensordict(to_tensordict(batch)).packed(), response_length=70)
    assert (wider.fields["top_k"][:, -1] == -1).all()


def assert_equal_fields(expected: RolloutBatch, actual: RolloutBatch) -> None:
    assert expected.rows == actual.rows
    assert sorted(expected.fields) == sorted(actual.fields)
    for name, tensor in expected.fields.items():
        assert torch.equal(tensor.nan_to_num(9), actual.fields[name].nan_to_num(9)), name
    assert str(dict(expected.field_fills)) == str(dict(actual.field_fills))


@pytest.mark.slow
def test_a_file_needs_no_plugin(tmp_path: Path) -> None:
    """This process has not the plugin: it reads the columns, and other programs find their declaration and bytes."""
    done = roll_out(tmp_path)

    assert done.returncode == 0, done.stderr
    assert "columns" not in {each.name for each in load(PluginRecipe()).plugins}
    rows = pq.read_table(tmp_path / "out/trajectories.parquet").to_pylist()
    for row in rows:
        (found,) = (each for each in row["open_columns"] if each["name"] == "top_k")
        assert TOP_K.to_dict() == json.loads(found["declaration"])
    for result in read_results(tmp_path / "out"):
        for record in result.trajectories:
            assert_columns(record)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"engine": {"name": "with_columns", "gives": ["unknown"]}},
            "the engine returned the column 'unknown', which no plugin declares; declared: routes, teacher, top_k",
        ),
        (
            {"engine": {"name": "with_columns", "gives": ["teacher"]}},
            "the engine returned the column 'teacher', which only a scorer may give",
        ),
    ],
)
def test_a_column_that_an_engine_may_not_give(sections: dict[str, object], text: str, tmp_path: Path) -> None:
    """The episodes fail, and the error names the column."""
    roll_out(tmp_path, **sections)

    faults = [each.fault for each in read_results(tmp_path / "out")]
    assert faults
    assert {("engine", text)} == {fault and (fault.owner, fault.message) for fault in faults}


def resume(folder: Path) -> subprocess.CompletedProcess[str]:
    """Resume the run in the folder `out`."""
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "--resume", str(folder / "out")]
    return subprocess.run(command, env=environment_of(folder), capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_columns(tmp_path: Path) -> None:
    """It is refused at its start, in one line, before an episode runs; with the plugin of its start it ends well."""
    done = roll_out(tmp_path)
    assert done.returncode == 0, done.stderr
    out, module = tmp_path / "out", tmp_path / SITE / "turnwise_columns.py"
    first, *_others = read_results(out)
    for name in ("trajectories.parquet", "metrics.json", "batch.safetensors"):
        (out / name).unlink()
    with TrajectoryWriter(out / "trajectories.parquet") as writer:
        writer.write(first)
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    module.write_text(SOURCE.replace('ColumnSpec(name="top_k", ', 'ColumnSpec(name="top_k", version=2, '))
    refused = resume(tmp_path)

    assert refused.returncode == 2, refused.stderr
    error = next(line for line in refused.stderr.splitlines() if line.startswith("turnwise: error: "))
    assert f"episode {first.uid!r} has the column 'top_k' in another declaration than" in error
    assert "Traceback" not in refused.stderr
    assert before == {path: path.read_bytes() for path in out.iterdir() if path in before}
    module.write_text(SOURCE)
    done = resume(tmp_path)
    assert done.returncode == 0, done.stderr
    assert 6 == len(read_results(out))
    assert (out / "batch.safetensors").exists()


@pytest.mark.slow
def test_two_plugins_declare_a_column(tmp_path: Path) -> None:
    """The command ends with one line that names both."""
    write_run(tmp_path)
    install_plugin(tmp_path / SITE, "turnwise_again", AGAIN, entry="again")
    done = roll_out(tmp_path, plugins=[PLUGIN, "columns", "again"])

    assert done.returncode == 2, done.stderr
    error = next(line for line in done.stderr.splitlines() if line.startswith("turnwise: error: "))
    assert "column 'routes' is registered by several plugins: 'again' and 'columns'" in error
    assert "Traceback" not in done.stderr


def test_a_plugin_takes_a_name_of_the_core(tmp_path: Path) -> None:
    """It is refused in one line, by its name."""
    write_run(tmp_path)
    install_plugin(tmp_path / SITE, "turnwise_taken", SOURCE.replace('"top_k"', '"logprobs"'), entry="taken")
    done = roll_out(tmp_path, plugins=[PLUGIN, "taken"])

    assert done.returncode == 2, done.stderr
    error = next(line for line in done.stderr.splitlines() if line.startswith("turnwise: error: "))
    assert "plugin 'taken'" in error
    assert "column 'logprobs': every record or batch has something of that name; choose another" in error


def resume_all(config: RunConfig, waiting: list[UnfinishedEpisode]) -> list[EpisodeResult]:
    """Continue episodes to their ends."""
    with RolloutManager.from_config(config) as manager:
        return list(manager.iterate([], resume=waiting))


def interrupt(config: RunConfig, folder: Path) -> list[UnfinishedEpisode]:
    """Start the run, abort it in the middle of turns, and return its episodes as a file has them."""
    with RolloutManager.from_config(config) as manager:
        timer = threading.Timer(0.06, manager.abort)
        timer.start()
        list(manager.iterate(load_tasks(config)))
        save_unfinished(folder / "unfinished.jsonl", manager.unfinished)
    waiting = load_unfinished(folder / "unfinished.jsonl")
    assert any(each.turns for each in waiting)
    return waiting


@pytest.mark.parametrize("old_file", [False, True])
def test_a_resume_after_the_plugin_has_changed(old_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No record has values of two versions: an episode with values of the first one fails, and says why."""
    monkeypatch.syspath_prepend(tmp_path / SITE)
    config = load_config(write_run(tmp_path, engine={"name": "with_columns", "token_latency_s": 0.003}))
    waiting = interrupt(config, tmp_path)
    started = [each for each in waiting if any(len(turn.result.token_ids) for turn in each.turns) or each.records]
    assert started
    if old_file:  # which names no declarations of turns
        waiting = [evolve(each, turns=tuple(evolve(turn, specs={}) for turn in each.turns)) for each in waiting]
    monkeypatch.setattr(turnwise_columns, "TOP_K", evolve(TOP_K, version=2))
    results = resume_all(config, waiting)

    assert len(waiting) == len(results)
    faults = [each.fault.message for each in results if each.fault]
    assert old_file or len(started) == len(faults)
    assert all("column 'top_k' is declared otherwise " in fault for fault in faults)


def test_a_resume_without_the_plugin_of_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens keep their values and later ones have the fill; half a turn with values fails, and says why."""
    monkeypatch.syspath_prepend(tmp_path / SITE)
    config = load_config(write_run(tmp_path, engine={"name": "with_columns", "token_latency_s": 0.003}))
    waiting = interrupt(config, tmp_path)
    gives = {"name": "with_columns", "gives": ["routes"]}
    without = load_config(write_run(tmp_path, engine=gives))
    monkeypatch.setattr(turnwise_columns, "SPECS", (ROUTES, TEACHER))
    results = resume_all(without, waiting)

    assert len(waiting) == len(results)
    text = "the engine returned the column 'top_k' for one part of a turn and not for the other"
    assert {text} >= {each.fault.message for each in results if each.fault}
    for record in (record for each in results for record in each.trajectories):
        check_trajectory(record)
        found = record.column("top_k") if "top_k" in record.columns else TOP_K.filled(record.num_response_tokens)
        given = top_k(record.response_ids)
        kept = ~TOP_K.is_fill(found)
        assert same(given[kept], found[kept])


def test_a_resume_keeps_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted run continues from a file, in the middle of turns and of paths, with the values of both parts."""
    monkeypatch.syspath_prepend(tmp_path / SITE)
    file = write_run(tmp_path, engine={"name": "with_columns", "token_latency_s": 0.003})
    config = load_config(file)
    whole: list[EpisodeResult] = []
    num_open = []
    with RolloutManager.from_config(config) as manager:
        timer = threading.Timer(0.06, manager.abort)
        timer.start()
        whole += [each for each in manager.iterate(load_tasks(config)) if each.status is not Status.ABORTED]
        for _round in range(50):
            save_unfinished(tmp_path / "unfinished.jsonl", manager.unfinished)
            waiting = load_unfinished(tmp_path / "unfinished.jsonl")
            num_open.append(len(waiting))
            if not waiting:
                break
            manager.forget(manager.unfinished)
            timer = threading.Timer(0.06, manager.abort)
            timer.start()
            whole += [each for each in manager.iterate([], resume=waiting) if each.status is not Status.ABORTED]
            timer.cancel()
    assert num_open[0] > 0
    assert 6 == len(whole)
    for result in whole:
        assert result.fault is None
        for record in result.trajectories:
            assert_columns(record)
