"""Weight updates: on shared devices, engine and trainer hold the memory in turns; on separate ones nothing moves."""

import pytest

from turnwise.errors import TurnwiseError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer
from turnwise.protocols.weights import UpdateReport
from turnwise_grpo_trainer.loop.weight_sync import DirectSync, HybridSync

STAGES = ["sleep", "onload", "offload_optimizer", "wake_up_weights", "sync_weights", "offload_parameters"]


class RecordingObserver(Observer):
    """Records the stages of the memory switch."""

    def __init__(self):
        self.stages = []

    def on_memory_switched(self, event):
        self.stages.append(str(event.stage))


class Engines:
    """The engines' side of the switch: records calls, and counts weight versions as a manager does."""

    def __init__(self, calls, observer):
        self.calls, self.observers, self.version, self.bytes = calls, Observers.of([observer]), 0, 300

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.bytes = 0

    def wake_up(self, tags):
        self.calls.append(f"wake_up {' '.join(tags)}")
        self.bytes += {"weights": 100, "kv_cache": 200}[tags[0]]

    def memory_bytes(self):
        return self.bytes

    def update_weights(self, weights, *, version=None):
        self.calls.append("update_weights")
        num_tensors = len(list(weights))
        self.version = self.version + 1 if version is None else version
        return UpdateReport(
            version=self.version, seconds=0.0, num_tensors=num_tensors, num_bytes=8, transport="direct", replicas=()
        )


class RecordingTrainer:
    """The trainer's side of the switch: records calls."""

    def __init__(self, calls):
        self.calls, self.bytes = calls, 50

    def offload_optimizer(self):
        self.calls.append("offload_optimizer")
        self.bytes = min(self.bytes, 10)

    def offload_parameters(self):
        self.calls.append("offload_parameters")
        self.bytes = 0

    def onload(self):
        self.calls.append("onload")
        self.bytes = 50

    def memory_bytes(self):
        return self.bytes

    def weights(self, *, adapters=False):
        return iter([("w", 0)])


@pytest.fixture
def calls():
    """The calls to engines and trainer, in order."""
    return []


@pytest.fixture
def observer():
    """An observer of the run."""
    return RecordingObserver()


@pytest.fixture
def engines(calls, observer):
    """The engines."""
    return Engines(calls, observer)


@pytest.fixture
def hybrid(calls, engines):
    """The strategy for shared devices."""
    return HybridSync(engines, RecordingTrainer(calls), 2)


def one_step(sync, version=1):
    """Run a training of one step without rollout and update; return the metrics."""
    sync.start()
    metrics = sync.before_update()
    metrics |= sync.update_weights(version)
    sync.finish()
    return metrics


def test_only_one_side_holds_the_device(hybrid, calls):
    """The trainer is offloaded before the first rollout, and returns to the device only while the engine sleeps."""
    one_step(hybrid)

    assert calls == [
        *("offload_optimizer", "offload_parameters"),
        *("sleep 2", "onload", "offload_optimizer", "wake_up weights", "update_weights"),
        *("offload_parameters", "wake_up kv_cache"),
        *("sleep 2", "onload"),
    ]


def test_observers_receive_every_stage(hybrid, observer):
    """Each stage but the engines' sleep and wake-up, which the manager reports, is an event of the run, in order."""
    one_step(hybrid)

    of_switch = [stage for stage in STAGES if stage not in ("sleep", "wake_up_weights")]
    assert [*of_switch, "onload"] == observer.stages


def test_each_stage_is_a_metric_of_the_step(hybrid):
    """The metrics have seconds and added bytes of each stage: engine stages count the engine, others the trainer."""
    metrics = one_step(hybrid)

    assert 8.0 == metrics["sync/bytes"]
    assert {f"switch/{stage}_s" for stage in [*STAGES, "wake_up_kv_cache"]} <= metrics.keys()
    added = {stage: metrics[f"switch/{stage}_bytes"] for stage in [*STAGES, "wake_up_kv_cache"]}
    assert added == {
        "sleep": -300,
        "onload": 50,
        "offload_optimizer": -40,
        "wake_up_weights": 100,
        "sync_weights": 0,
        "offload_parameters": -10,
        "wake_up_kv_cache": 200,
    }


def test_a_resume_updates_the_weights_without_a_switch(hybrid, calls):
    """Before `start`, the policy is still on the device: the engine gets its weights, and no memory moves."""
    metrics = hybrid.update_weights(7)

    assert (["update_weights"], {"sync/bytes": 8.0}) == (calls, metrics)
    hybrid.start()
    hybrid.before_update()
    assert "switch/sync_weights_s" in hybrid.update_weights(8)


def test_a_wrong_version_is_an_error(hybrid):
    """Training stops if the engine counts another version than the policy: staleness would be wrong from there on."""
    hybrid.start()
    hybrid.before_update()

    with pytest.raises(RuntimeError, match="the engine has weight version 1, the policy 5"):
        hybrid.update_weights(5)


def test_an_update_before_the_switch_is_an_error(hybrid):
    """An update of the policy without its memory on the device is refused."""
    with pytest.raises(RuntimeError, match="call start first"):
        hybrid.before_update()


def test_a_failed_stage_names_the_stage(hybrid, engines):
    """If an engine cannot sleep, the error says so instead of training beside it."""
    hybrid.start()
    engines.sleep = lambda _level: (_ for _ in ()).throw(ValueError("no sleep mode"))

    with pytest.raises(TurnwiseError, match="to_training failed at sleep: ValueError: no sleep mode"):
        hybrid.before_update()


def test_separate_devices_only_update_weights(calls, engines):
    """Without shared devices, a step sends the weights with the policy's version and moves no memory."""
    sync = DirectSync(engines, RecordingTrainer(calls))

    metrics = one_step(sync, version=4)

    assert (["update_weights"], 4, {"sync/bytes": 8.0}) == (calls, engines.version, metrics)
