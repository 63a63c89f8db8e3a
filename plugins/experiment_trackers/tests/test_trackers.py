"""The trackers on the real libraries: W&B offline, MLflow with a folder as store, TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import struct
import time
from math import nan

import numpy as np
import pytest

from turnwise import EpisodeResult, PluginRecipe, Resources, Status, Task, Trajectory, TrajectoryScore
from turnwise.config.resolve import build_part
from turnwise.errors import ConfigError
from turnwise.events.observer import MetricsLogged, TrainingStarted
from turnwise.plugin.host import load
from turnwise_experiment_trackers.mlflow_tracker import MlflowConfig, make_mlflow
from turnwise_experiment_trackers.samples import shorten
from turnwise_experiment_trackers.tensorboard_tracker import EVENTS_FOLDER, TensorboardConfig, make_tensorboard
from turnwise_experiment_trackers.tracker import flatten
from turnwise_experiment_trackers.wandb_tracker import WandbConfig, make_wandb
from turnwise_result_files import TrajectoryWriter

SETTINGS = {"model": "tiny", "train": {"num_steps": 3, "optimizer": {"lr": 1e-3, "betas": (0.9, 0.999)}}}


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """Use no account and no network, and write only to the test's folder."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def emit_training(tracker, folder, lines, *, resumed=False):
    """Emit the events of a training to a tracker."""
    tracker.open()
    tracker.on_training_started(TrainingStarted(folder=folder, settings=SETTINGS, resumed=resumed))
    for step, values in lines:
        tracker.on_metrics_logged(MetricsLogged(step=step, values=values))
    tracker.close()
    tracker.close()


FIRST = [(1, {"reward/mean": 0.25, "gap/max": nan}), (2, {"reward/mean": 0.5})]
SECOND = [(2, {"reward/mean": 0.5}), (3, {"reward/mean": 0.75, "validation/reward/mean": 1.0})]


@pytest.fixture
def store(tmp_path):
    """Return a factory of trackers on one MLflow store, and a client of the store."""
    from mlflow import MlflowClient

    config = MlflowConfig(tracking_uri=f"file://{tmp_path}/store", experiment="sums", tags={"kind": "test"})
    return lambda: make_mlflow(config, Resources()), MlflowClient(tracking_uri=config.tracking_uri)


@pytest.mark.slow
def test_mlflow(store, tmp_path):
    """Settings become parameters and metrics carry their step; a resumed training continues its run."""
    make, client = store

    emit_training(make(), tmp_path, FIRST)
    emit_training(make(), tmp_path, SECOND, resumed=True)

    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert "FINISHED" == run.info.status
    assert "test" == run.data.tags["kind"]
    assert {"model": "tiny", "train.num_steps": "3", "train.optimizer.lr": "0.001"}.items() <= run.data.params.items()
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "reward/mean")]
    assert [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)] == sorted(history)
    assert 1.0 == run.data.metrics["validation/reward/mean"]

    emit_training(make(), tmp_path, FIRST)

    assert 2 == len(client.search_runs([run.info.experiment_id]))


def test_mlflow_reports_a_failed_write(store, tmp_path):
    """The call after a failed write raises its error, and `close` still ends the run."""
    make, client = store
    tracker = make()
    tracker.open()
    tracker.on_training_started(TrainingStarted(folder=tmp_path))
    tracker.on_metrics_logged(MetricsLogged(step=1, values={"a name!": 1.0}))

    with pytest.raises(Exception, match="a name!"):
        tracker.on_metrics_logged(MetricsLogged(step=2, values={"reward/mean": 1.0}))
    tracker.close()

    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert "FINISHED" == run.info.status


def test_mlflow_unreachable_store(tmp_path):
    """An unreachable store raises a one-line error before training starts."""
    tracker = make_mlflow(MlflowConfig(tracking_uri="nothing://here"), Resources())

    with pytest.raises(ConfigError, match=r"^observer mlflow: nothing://here: [^\n]+$"):
        tracker.open()


def log_entries(data):
    """Yield the records of a log in LevelDB's format, after W&B's header of 7 bytes."""
    block, header = 32768, 7
    place, entry = header, b""
    while place + header <= len(data):
        if block - place % block < header:
            place += block - place % block
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, place)
        entry += data[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):  # a full record, or the last fragment of one
            yield entry
            entry = b""


def read_wandb_file(path):
    """Return the records of a W&B file; wait for W&B's process to write the last one."""
    from wandb.proto.wandb_internal_pb2 import Record

    for _ in range(6000):
        records = [Record.FromString(entry) for entry in log_entries(path.read_bytes())]
        if "exit" in [record.WhichOneof("record_type") for record in records]:
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} has no exit record")


def read_wandb_folder(folder):
    """Return the run ids, the settings and the (step, name, value) of all metrics in a training's offline files."""
    ids, settings, lines = set(), {}, []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in read_wandb_file(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                settings |= {item.key: item.value_json for item in record.run.config.update}
            elif kind == "history":
                line = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
                lines += [(int(line["step"]), name, value) for name, value in line.items() if "/" in name]
    return ids, settings, lines


@pytest.mark.slow
def test_wandb(tmp_path):
    """A resumed training continues its run, and repeated steps are kept."""
    config = WandbConfig(project="sums", mode="offline", tags=("a",))

    emit_training(make_wandb(config, Resources()), tmp_path, FIRST)
    time.sleep(1.1)  # W&B names its folders by time, with a resolution of a second
    emit_training(make_wandb(config, Resources()), tmp_path, SECOND, resumed=True)

    ids, settings, lines = read_wandb_folder(tmp_path)
    assert {(tmp_path / "wandb_run_id.txt").read_text().strip()} == ids
    assert '"tiny"' == settings["model"]
    assert [(1, "0.25"), (2, "0.5"), (2, "0.5"), (3, "0.75")] == sorted(
        (step, value) for step, name, value in lines if name == "reward/mean"
    )


def test_wandb_without_a_login(tmp_path, monkeypatch):
    """A failed login raises a one-line error before training starts."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    tracker = make_wandb(WandbConfig(mode="online"), Resources())

    with pytest.raises(ConfigError, match=r"^observer wandb: [^\n]+$"):
        tracker.open()


def log_to_tensorboard(folder, lines, *, resumed=False):
    """Emit the events of a training to a new TensorBoard tracker."""
    emit_training(make_tensorboard(TensorboardConfig(), Resources()), folder, lines, resumed=resumed)


def read_scalars(folder, name):
    """Return the steps and values that TensorBoard shows of a metric."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / EVENTS_FOLDER)).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_tensorboard(tmp_path):
    """Metrics are scalars under their names; a resumed training replaces the steps that it logs again."""
    log_to_tensorboard(tmp_path, FIRST)
    assert [(1, 0.25), (2, 0.5)] == read_scalars(tmp_path, "reward/mean")

    log_to_tensorboard(tmp_path, [(2, {"reward/mean": 0.625}), (3, {"reward/mean": 0.75})], resumed=True)

    assert [(1, 0.25), (2, 0.625), (3, 0.75)] == read_scalars(tmp_path, "reward/mean")


def test_tensorboard_after_an_interrupted_validation(tmp_path):
    """If a resumed training starts with the validation of its checkpoint's step, that step's metrics stay."""
    log_to_tensorboard(tmp_path, FIRST)

    log_to_tensorboard(tmp_path, [(2, {"validation/reward/mean": 1.0}), (3, {"reward/mean": 0.75})], resumed=True)

    assert [(1, 0.25), (2, 0.5), (3, 0.75)] == read_scalars(tmp_path, "reward/mean")
    assert [(2, 1.0)] == read_scalars(tmp_path, "validation/reward/mean")


def test_tensorboard_of_a_new_training(tmp_path):
    """A new training in the folder of another one hides the metrics of the old one."""
    log_to_tensorboard(tmp_path, FIRST)

    log_to_tensorboard(tmp_path, [(1, {"reward/mean": 0.0})])

    assert [(1, 0.0)] == read_scalars(tmp_path, "reward/mean")


def test_tensorboard_without_metrics(tmp_path):
    """A training that logs nothing leaves no files."""
    log_to_tensorboard(tmp_path, [])

    assert not (tmp_path / EVENTS_FOLDER).exists()


HOSTILE = "</code><script>alert(1)</script>\n# heading\x85**bold**\u2028[link](http://127.0.0.1)"


def write_samples(folder, step):
    """Write the episodes of a step as the trainer does: two trajectories, of which the second was not scored."""
    record = Trajectory([1, 2])
    record.add_action([3, 4], [-0.5, -0.5])
    record.add_observation([5])
    texts = {2: "How much?", 3: HOSTILE}
    path = folder / "episodes" / f"step-{step:08d}.parquet"
    with TrajectoryWriter(path, decode=lambda ids: texts[len(ids)], training_step=step) as writer:
        for number, scores in enumerate([(TrajectoryScore(value=1.0, extra={"format": 0.25}),), ()]):
            episode = EpisodeResult(
                task=Task(messages=(), uid="t1"),
                rollout_n=number,
                status=Status.COMPLETED,
                trajectories=(record,),
                scores=scores,
            )
            writer.write(episode, [np.array([1.5, 0.5, 0.0], np.float32) if scores else None])


def read_texts(folder):
    """Return the steps and samples that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / EVENTS_FOLDER)).Reload()
    if "samples/text_summary" not in accumulator.Tags()["tensors"]:
        return []
    return [
        (event.step, event.tensor_proto.string_val[0].decode()) for event in accumulator.Tensors("samples/text_summary")
    ]


def test_samples_in_tensorboard(tmp_path):
    """A step with episodes has them as text, in blocks of code; a validation, and a step without a file, have none."""
    write_samples(tmp_path, 2)
    lines = [(1, {"reward/mean": 0.0}), (2, {"reward/mean": 0.5}), (2, {"validation/reward/mean": 1.0})]
    log_to_tensorboard(tmp_path, lines)

    ((step, text),) = read_texts(tmp_path)
    assert 2 == step
    assert "**`t1` sample 0, completed, reward 1.000, advantage 1.000**" in text
    assert "**`t1` sample 1, completed**" in text
    assert '`{"format": 0.25}`' in text
    assert "    How much?" in text
    shown = [
        line for line in text.splitlines() if "script" in line or "heading" in line or "bold" in line or "link" in line
    ]
    assert 8 == len(shown)
    assert all(line.startswith("    ") for line in shown)


def test_no_samples(tmp_path):
    """With `samples: 0` no text is logged, and the file is not read."""
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "step-00000001.parquet").write_text("nothing")

    emit_training(make_tensorboard(TensorboardConfig(samples=0), Resources()), tmp_path, FIRST)

    assert [] == read_texts(tmp_path)
    assert [(1, 0.25), (2, 0.5)] == read_scalars(tmp_path, "reward/mean")


@pytest.mark.slow
def test_samples_in_wandb(tmp_path):
    """The table has a row for each trajectory up to the limit; without the option no text leaves the machine."""
    write_samples(tmp_path, 2)
    for samples, expected in ((0, []), (1, [0]), (5, [0, 1])):
        folder = tmp_path / str(samples)
        (folder / "episodes").mkdir(parents=True)
        source = tmp_path / "episodes" / "step-00000002.parquet"
        (folder / "episodes" / source.name).write_bytes(source.read_bytes())

        emit_training(make_wandb(WandbConfig(mode="offline", samples=samples), Resources()), folder, FIRST)

        tables = [
            json.loads(path.read_text()) for path in folder.glob("wandb/offline-run-*/files/media/table/samples*.json")
        ]
        assert [row[2] for table in tables for row in table["data"]] == expected
        for table in tables:
            assert ["step", "task", "sample", "status", "reward", "parts", "advantage", "prompt", "response"] == (
                table["columns"]
            )
            assert [2, "t1", 0, "completed", 1.0, '{"format": 0.25}', 1.0, "How much?", HOSTILE] == table["data"][0]


def test_long_texts_are_cut():
    """A text of a million characters is cut, and its length is given."""
    assert len(shorten("a" * 10**6)) < 21_000
    assert shorten("a" * 10**6).endswith(" ... (1000000 characters)")
    assert ("", "a") == (shorten(None), shorten("a"))


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_missing_library(monkeypatch, name):
    """The error for a missing library names the package to install."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each, *more: None if each == name else find(each, *more))
    host = load(PluginRecipe(allow=("experiment_trackers",)))

    with pytest.raises(ConfigError) as caught:
        build_part(host, "observers", name, Resources(), path="observers.0")

    assert f"pip install 'turnwise-experiment-trackers[{name}]'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flatten():
    """Dots join the names of nested settings."""
    expected = {
        "model": "tiny",
        "train.num_steps": "3",
        "train.optimizer.lr": "0.001",
        "train.optimizer.betas": "(0.9, 0.999)",
    }

    assert expected == dict(flatten(SETTINGS))
