"""The trackers on the real libraries: W&B offline, MLflow with a folder as store, TensorBoard."""

from __future__ import annotations

import importlib.util
import struct
import time
from math import nan

import pytest

from turnwise import NoConfig, PluginRecipe, Resources
from turnwise.config.resolve import build_part
from turnwise.errors import ConfigError
from turnwise.events.observer import MetricsLogged, TrainingStarted
from turnwise.plugin.host import load
from turnwise_experiment_trackers.mlflow_tracker import MlflowConfig, make_mlflow
from turnwise_experiment_trackers.tensorboard_tracker import EVENTS_FOLDER, make_tensorboard
from turnwise_experiment_trackers.tracker import flatten
from turnwise_experiment_trackers.wandb_tracker import WandbConfig, make_wandb

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

    for _ in range(300):
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
    emit_training(make_tensorboard(NoConfig(), Resources()), folder, lines, resumed=resumed)


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
