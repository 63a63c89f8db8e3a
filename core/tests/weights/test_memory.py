"""The memory switch executes its tables: order of stages, peak memory, illegal calls, failures, several callers."""

import threading
from contextlib import nullcontext

import pytest
from attrs import define, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer
from turnwise.protocols.weights import UpdateReport
from turnwise.weights.memory import MemorySwitch, SwitchError
from turnwise.weights.memory_states import TRANSITIONS, Stage, SwitchState
from turnwise_testing.references.memory_peak import HOLDS, Part, peak_bytes

SIZES = {
    Part.ENGINE_WEIGHTS: 16,
    Part.ENGINE_KV_CACHE: 30,
    Part.TRAINER_PARAMETERS: 20,
    Part.TRAINER_OPTIMIZER: 40,
}
WEIGHTS = (("w", None),)


class OutOfMemoryError(Exception):
    """The device is full."""


@define(eq=False)
class Device:
    """A fake allocator: it counts bytes, refuses parts that do not fit, and fails on request."""

    capacity: int = 10**9
    held: set = field(factory=lambda: {Part.ENGINE_WEIGHTS, Part.ENGINE_KV_CACHE})
    peak: int = 0
    calls: list = field(factory=list)
    failing: list = field(factory=list)

    def used(self, parts):
        return sum(SIZES[part] for part in self.held.intersection(parts))

    def allocate(self, *parts):
        self.held.update(parts)
        self.peak = max(self.peak, self.used(Part))
        if self.used(Part) > self.capacity:
            self.held.difference_update(parts)
            raise OutOfMemoryError(f"{parts} do not fit")

    def free(self, *parts):
        self.held.difference_update(parts)

    def note(self, call):
        self.calls.append(call)
        if call in self.failing:
            self.failing.remove(call)
            raise RuntimeError(f"{call} broke")


@define(eq=False)
class Engines:
    device: Device
    version: int = 0
    level: int = 0

    def sleep(self, level=1):
        self.device.note("sleep")
        self.level = level
        self.device.free(Part.ENGINE_WEIGHTS, Part.ENGINE_KV_CACHE)

    def wake_up(self, tags=("weights", "kv_cache")):
        for tag in tags:
            self.device.note(f"wake_up_{tag}")
            self.device.allocate(Part.ENGINE_WEIGHTS if tag == "weights" else Part.ENGINE_KV_CACHE)

    def update_weights(self, weights, *, version=None):
        assert Part.ENGINE_WEIGHTS in self.device.held
        self.device.note("sync_weights")
        self.version += 1
        return UpdateReport(
            version=self.version, seconds=0.0, num_tensors=1, num_bytes=1, transport="direct", replicas=()
        )

    def memory_bytes(self):
        return self.device.used((Part.ENGINE_WEIGHTS, Part.ENGINE_KV_CACHE))


@define(eq=False)
class Trainer:
    device: Device

    def offload_optimizer(self):
        self.device.note("offload_optimizer")
        self.device.free(Part.TRAINER_OPTIMIZER)

    def offload_parameters(self):
        self.device.note("offload_parameters")
        self.device.free(Part.TRAINER_PARAMETERS)

    def onload(self):
        self.device.note("onload")
        self.device.allocate(Part.TRAINER_PARAMETERS)
        self.device.allocate(Part.TRAINER_OPTIMIZER)

    def memory_bytes(self):
        return self.device.used((Part.TRAINER_PARAMETERS, Part.TRAINER_OPTIMIZER))


def make(**options):
    device = Device()
    return MemorySwitch(Engines(device), Trainer(device), **options), device


CYCLE = [
    "sleep",
    "onload",
    "offload_optimizer",
    "wake_up_weights",
    "sync_weights",
    "offload_parameters",
    "wake_up_kv_cache",
]


def test_a_cycle_has_the_declared_order_and_reports_freed_memory():
    """Reports have the bytes of every stage, events those of the switch itself, and the version rises at the end."""
    events = []

    class Recorder(Observer):
        def on_memory_switched(self, event):
            events.append((event.stage, event.replica, event.bytes_before, event.bytes_after))

    switch, device = make(observers=Observers.of([Recorder()]))
    there = switch.to_training()
    back = switch.to_rollout(WEIGHTS)

    assert CYCLE == device.calls
    assert [(46, 0), (0, 0)] == [stage.engine_bytes for stage in there.stages]
    assert [(0, 0), (0, 60)] == [stage.trainer_bytes for stage in there.stages]
    assert [(60, 20), (20, 20), (20, 20), (20, 0), (0, 0)] == [stage.trainer_bytes for stage in back.stages]
    assert [(0, 0), (0, 16), (16, 16), (16, 16), (16, 46)] == [stage.engine_bytes for stage in back.stages]
    assert (SwitchState.ROLLOUT, 1, 1) == (back.state, back.version, switch.version)
    assert back.update is not None
    # The engines emit the events of their sleep and wake-up, because they sleep without a switch too.
    assert [("onload", -1, 0, 60), ("offload_optimizer", -1, 60, 20)] == events[:2]
    assert [("sync_weights", 0, 16, 16), ("offload_parameters", -1, 20, 0)] == events[2:]


def test_peak_bytes():
    """The peak is the larger side, or the trainer's parameters with the engines' weights; never both sides together."""
    assert max(16 + 30, 20 + 40, 20 + 16) == peak_bytes(SIZES)
    assert 70 == peak_bytes({**SIZES, Part.ENGINE_WEIGHTS: 50, Part.ENGINE_KV_CACHE: 0})


def stages_of(key):
    return [step.stage for step in TRANSITIONS[key].steps]


@pytest.mark.parametrize("failing", [None, *CYCLE])
@pytest.mark.parametrize("key", [key for key in TRANSITIONS if key[0] is not SwitchState.BROKEN])
def test_every_legal_path_fits_the_declared_peak(key, failing):
    """A device of exactly `peak_bytes` suffices for every call in every state, also if any stage fails."""
    state, call = key
    switch, device = make()
    switch.state, device.held = state, set(HOLDS[state])
    device.capacity = peak_bytes(SIZES)
    device.failing = [failing] if failing else []
    arguments = (WEIGHTS,) if call == "to_rollout" else ()
    expected = nullcontext() if failing not in stages_of(key) else pytest.raises(SwitchError, match=f"at {failing}")
    with expected:
        getattr(switch, call)(*arguments)

    assert device.peak <= device.capacity
    assert HOLDS[switch.state] == device.held


def test_an_illegal_call_changes_nothing():
    """The error of an illegal call names the state and the legal calls."""
    switch, device = make()

    with pytest.raises(SwitchError, match="cannot call recover in state rollout; legal: to_training, to_sleep"):
        switch.recover()
    assert (SwitchState.ROLLOUT, []) == (switch.state, device.calls)


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("sleep", SwitchState.ROLLOUT),
        ("onload", SwitchState.ASLEEP),
        ("offload_optimizer", SwitchState.TRAINING),
        ("wake_up_weights", SwitchState.HANDOVER),
        ("sync_weights", SwitchState.HANDOVER),
        ("offload_parameters", SwitchState.HANDOVER),
        ("wake_up_kv_cache", SwitchState.ASLEEP),
    ],
)
def test_a_failing_stage_ends_in_a_safe_state(failing, expected):
    """The error names the stage, its cause and the state, and the call can be repeated."""
    switch, device = make()
    device.failing = [failing]
    if failing not in ("sleep", "onload"):
        switch.to_training()
    with pytest.raises(SwitchError, match=f"{failing}: RuntimeError: {failing} broke.*safe state {expected}"):
        switch.to_training() if failing in ("sleep", "onload") else switch.to_rollout(WEIGHTS)

    assert expected == switch.state
    assert HOLDS[expected] == device.held
    if expected in (SwitchState.ROLLOUT, SwitchState.ASLEEP):
        switch.to_training()
    assert SwitchState.ROLLOUT == switch.to_rollout(WEIGHTS).state


def test_a_failed_undo_is_broken_until_it_recovers():
    """A second failure while undoing leaves an unknown state; `recover` frees the device completely."""
    switch, device = make()
    switch.to_training()
    device.failing = ["sync_weights", "sleep"]
    with pytest.raises(SwitchError, match="unknown state: call recover"):
        switch.to_rollout(WEIGHTS)

    assert (SwitchState.BROKEN, ("recover",)) == (switch.state, switch.legal_calls)
    assert SwitchState.ASLEEP == switch.recover().state
    assert set() == device.held


def test_level_2_needs_weights_and_cannot_be_undone():
    """After level 2 the engines need new weights, and a sleep that failed cannot be undone by waking up."""
    switch, device = make(level=2)
    switch.to_sleep()
    with pytest.raises(SwitchError, match=r"to_rollout in state asleep \(sleep level 2\) needs weights"):
        switch.to_rollout()
    switch.to_rollout(WEIGHTS)
    device.failing = ["sleep"]
    with pytest.raises(SwitchError, match="may have dropped weights"):
        switch.to_training()
    assert SwitchState.BROKEN == switch.state


def test_level_1_keeps_its_weights():
    """Weights may be omitted in state `asleep`, and not in state `training`."""
    switch, device = make()
    switch.to_sleep()
    assert 0 == switch.to_rollout().version
    assert "sync_weights" not in device.calls
    switch.to_training()
    with pytest.raises(SwitchError, match="needs weights"):
        switch.to_rollout()
    assert SwitchState.TRAINING == switch.state


def test_concurrent_calls_are_serialized():
    """Of several threads with the same call, one succeeds and the others get an error with the new state."""
    switch, device = make()
    outcomes = []

    def switch_once():
        try:
            outcomes.append(str(switch.to_training().state))
        except SwitchError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=switch_once) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    refused = "cannot call to_training in state training; legal: to_rollout, to_sleep"
    assert sorted([refused] * 7 + ["training"]) == sorted(outcomes)
    assert ["sleep", "onload"] == device.calls


@settings(max_examples=60, stateful_step_count=25, deadline=None)
class SwitchMachine(RuleBasedStateMachine):
    """Calls in any order, with any failing stages: the device holds the memory of the state, within the peak."""

    def __init__(self):
        super().__init__()
        self.switch, self.device = make()
        self.device.capacity = peak_bytes(SIZES)

    @rule(
        call=st.sampled_from(["to_training", "to_rollout", "to_sleep", "recover"]), fail=st.sets(st.sampled_from(CYCLE))
    )
    def call(self, call, fail):
        before, self.device.failing = self.switch.state, sorted(fail)
        legal = call in self.switch.legal_calls
        num_calls, version = len(self.device.calls), self.switch.version
        report, error = None, None
        try:
            report = getattr(self.switch, call)(*((WEIGHTS,) if call == "to_rollout" else ()))
        except SwitchError as raised:
            error = raised
        if report is None:
            assert (error.state, self.switch.version) == (self.switch.state, version)
        else:
            assert TRANSITIONS[before, call].target == report.state == self.switch.state
        if not legal:
            assert (before, num_calls, None) == (self.switch.state, len(self.device.calls), report)
        self.device.failing = []

    @invariant()
    def device_matches_the_state(self):
        if self.switch.state is not SwitchState.BROKEN:
            assert HOLDS[self.switch.state] == self.device.held

    @invariant()
    def peak_is_not_exceeded(self):
        assert self.device.peak <= self.device.capacity


TestSwitchMachine = SwitchMachine.TestCase


def test_every_stage_is_used():
    """The tables contain every stage."""
    used = {step.stage for transition in TRANSITIONS.values() for step in transition.steps}

    assert set(Stage) == used
