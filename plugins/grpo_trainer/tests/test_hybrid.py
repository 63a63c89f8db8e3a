"""The loop of mode `hybrid`: who holds the device when, and who hears of it."""

from types import SimpleNamespace

import pytest

from turnwise.observer import Observer
from turnwise.telemetry import Observers
from turnwise.weights import UpdateReport
from turnwise_grpo_trainer.loop import Stages, TrainLoop
from turnwise_grpo_trainer.modes import HybridLoop

CALLS = ("offload_optimizer", "offload_parameters", "onload", "sleep", "wake_up")


class Ears(Observer):
    """Remembers the stages that it was told of."""

    def __init__(self):
        self.heard = []

    def on_memory_switched(self, event):
        self.heard.append(str(event.stage))


@pytest.fixture
def ears():
    """An observer of the run."""
    return Ears()


@pytest.fixture
def calls():
    """What engine and trainer were told, in order."""
    return []


@pytest.fixture
def numbers():
    """What the step says to the logs."""
    return {}


@pytest.fixture
def loop(calls, ears, numbers, monkeypatch):
    """A loop of one step that rolls out nothing and learns nothing."""

    def recorder(**others):
        told = {name: lambda *_, name=name: calls.append(name) for name in CALLS}
        return SimpleNamespace(**told, memory_bytes=lambda: 0, **others)

    def update_weights(_weights, *, version=None):
        calls.append("update_weights")
        return UpdateReport(version=1, seconds=0.0, num_tensors=1, num_bytes=8, transport="direct", replicas=())

    def one_step(loop):
        numbers.update(loop.update([], Stages()))
        loop.version += 1
        numbers.update(loop.bring_weights())

    monkeypatch.setattr(TrainLoop, "run", one_step)
    monkeypatch.setattr(TrainLoop, "update", lambda *_: calls.append("learn") or {})
    manager = recorder(update_weights=update_weights, observers=Observers.of([ears]))
    trainer = recorder(weights=lambda: iter([("w", 0)]))
    run = SimpleNamespace(memory=SimpleNamespace(level=2))
    fields = dict.fromkeys(("log", "view", "out", "stream", "buffer"))
    return HybridLoop(setup=SimpleNamespace(run=run), manager=manager, trainer=trainer, **fields)


def test_one_side_at_a_time(loop, calls):
    """The trainer is off the device before the first rollout, and comes back only when the engine sleeps."""
    loop.run()

    assert calls == [
        *("offload_optimizer", "offload_parameters"),
        *("sleep", "onload", "learn", "offload_optimizer", "wake_up", "update_weights"),
        *("offload_parameters", "wake_up"),
        *("sleep", "onload"),
    ]


def test_observers_hear_every_stage(loop, ears):
    """As of all that happens in a run."""
    loop.run()

    stages = ["sleep", "onload", "offload_optimizer", "wake_up_weights", "sync_weights", "offload_parameters"]
    assert [*stages, "wake_up_kv_cache", "sleep", "onload"] == ears.heard


def test_each_stage_is_a_number_of_the_step(loop, numbers):
    """With its seconds, and what was sent."""
    loop.run()

    assert 8.0 == numbers["sync/bytes"]
    assert {"switch/sleep_s", "switch/sync_weights_s", "switch/wake_up_kv_cache_bytes"} <= numbers.keys()
