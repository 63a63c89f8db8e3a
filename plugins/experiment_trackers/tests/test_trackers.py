"""Both trackers against the real libraries: W&B offline, MLflow with a store in a folder."""

from __future__ import annotations

import importlib.util
import struct
import time
from math import nan

import pytest

from turnwise import PluginRecipe, Resources
from turnwise.errors import ConfigError
from turnwise.host import load
from turnwise.observer import MetricsLogged, TrainingStarted
from turnwise_experiment_trackers.mlflow_tracker import MlflowConfig, make_mlflow
from turnwise_experiment_trackers.tracker import flattened
from turnwise_experiment_trackers.wandb_tracker import WandbConfig, make_wandb

SETTINGS = {"model": "tiny", "train": {"num_steps": 3, "optimizer": {"lr": 1e-3, "betas": (0.9, 0.999)}}}


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """No account, no network, and nothing outside the test's folder."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def trained(tracker, folder, lines, *, resumed=False):
    """Let a tracker hear a training."""
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
    """Make trackers of one MLflow store, and its client."""
    from mlflow import MlflowClient

    config = MlflowConfig(tracking_uri=f"file://{tmp_path}/store", experiment="sums", tags={"kind": "test"})
    return lambda: make_mlflow(config, Resources()), MlflowClient(tracking_uri=config.tracking_uri)


def test_mlflow(store, tmp_path):
    """Settings become parameters, numbers metrics by step; a resumed training goes on in its run."""
    make, client = store

    trained(make(), tmp_path, FIRST)
    trained(make(), tmp_path, SECOND, resumed=True)

    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert "FINISHED" == run.info.status
    assert "test" == run.data.tags["kind"]
    assert {"model": "tiny", "train.num_steps": "3", "train.optimizer.lr": "0.001"}.items() <= run.data.params.items()
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "reward/mean")]
    assert [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)] == sorted(history)
    assert 1.0 == run.data.metrics["validation/reward/mean"]

    trained(make(), tmp_path, FIRST)

    assert 2 == len(client.search_runs([run.info.experiment_id]))


def test_mlflow_says_what_did_not_arrive(store, tmp_path):
    """The core switches an observer off that raises, and logs it; the run is ended all the same."""
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


def test_mlflow_store_that_does_not_answer(tmp_path):
    """One line, before anything is trained."""
    tracker = make_mlflow(MlflowConfig(tracking_uri="nothing://here"), Resources())

    with pytest.raises(ConfigError, match=r"^observer mlflow: nothing://here: [^\n]+$"):
        tracker.open()


def log_entries(data):
    """Yield the entries of a log in the form of LevelDB, behind the 7 bytes with which W&B begins."""
    block, header = 32768, 7
    place, entry = header, b""
    while place + header <= len(data):
        if block - place % block < header:
            place += block - place % block
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, place)
        entry += data[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def records_of(path):
    """Return the records of a file of W&B, whose process may still be writing the last ones."""
    from wandb.proto.wandb_internal_pb2 import Record

    for _ in range(300):
        records = [Record.FromString(entry) for entry in log_entries(path.read_bytes())]
        if "exit" in [record.WhichOneof("record_type") for record in records]:
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def wandb_records(folder):
    """Return what the offline files of a training hold: run ids, settings and (step, name, value) of all lines."""
    ids, settings, lines = set(), {}, []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records_of(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                settings |= {item.key: item.value_json for item in record.run.config.update}
            elif kind == "history":
                line = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
                lines += [(int(line["step"]), name, value) for name, value in line.items() if "/" in name]
    return ids, settings, lines


def test_wandb(tmp_path):
    """A resumed training goes on in its run, and steps that come again are kept."""
    config = WandbConfig(project="sums", mode="offline", tags=("a",))

    trained(make_wandb(config, Resources()), tmp_path, FIRST)
    time.sleep(1.1)  # W&B names its folders by the second
    trained(make_wandb(config, Resources()), tmp_path, SECOND, resumed=True)

    ids, settings, lines = wandb_records(tmp_path)
    assert {(tmp_path / "wandb_run_id.txt").read_text().strip()} == ids
    assert '"tiny"' == settings["model"]
    assert [(1, "0.25"), (2, "0.5"), (2, "0.5"), (3, "0.75")] == sorted(
        (step, value) for step, name, value in lines if name == "reward/mean"
    )


def test_wandb_without_a_login(tmp_path, monkeypatch):
    """One line, before anything is trained."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    tracker = make_wandb(WandbConfig(mode="online"), Resources())

    with pytest.raises(ConfigError, match=r"^observer wandb: [^\n]+$"):
        tracker.open()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_library(monkeypatch, name):
    """The line says what to install."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each, *more: None if each == name else find(each, *more))
    host = load(PluginRecipe(allow=("experiment_trackers",)))

    with pytest.raises(ConfigError) as caught:
        host.build("observers", name, {}, Resources(), path="observers.0")

    assert f"pip install 'turnwise-experiment-trackers[{name}]'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flattened():
    """Names of nested settings are joined by dots."""
    expected = {
        "model": "tiny",
        "train.num_steps": "3",
        "train.optimizer.lr": "0.001",
        "train.optimizer.betas": "(0.9, 0.999)",
    }

    assert expected == dict(flattened(SETTINGS))
