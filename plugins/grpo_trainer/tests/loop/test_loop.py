"""The training loop: the order of a step, validations and checkpoints, interrupts, and the saved state."""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise.errors import ConfigError, EngineError
from turnwise.types import Fault
from turnwise_grpo_trainer.config import CheckpointConfig, OptimizerConfig, TrainConfig, ValidationConfig
from turnwise_grpo_trainer.loop import loop as loop_module
from turnwise_grpo_trainer.loop.checkpoints import TrainingState
from turnwise_grpo_trainer.loop.interrupts import Interrupt, TrainingInterruptedError
from turnwise_grpo_trainer.loop.loop import TrainLoop
from turnwise_grpo_trainer.report.episode_log import EpisodeLog
from turnwise_result_files import read_training_step
from turnwise_rollout_buffer import EpisodeGroup, TrajectoryBuffer

TASK = Task(messages=({"role": "user", "content": "?"},), uid="t")


def make_episode(reward=1.0, number=0, step=1, **options):
    """Return an episode with one sampled token."""
    record = Trajectory([1, 2])
    record.add_action([3], [-0.5])
    options = {"status": Status.COMPLETED, "scores": (TrajectoryScore(value=reward),)} | options
    return EpisodeResult(task=TASK, rollout_n=number, global_step=step, trajectories=(record,), **options)


class Parts:
    """Manager, trainer, source, weight sync, store, log and view in one; records the calls, in order."""

    stage = "rollout"

    def __init__(self, groups=lambda _step: [EpisodeGroup((make_episode(), make_episode(0.0)))]):
        self.collected, self.calls, self.lines, self.unfinished = groups, [], [], ()
        self.groups = None  # of a manager without a group reward
        self.interrupt_at, self.loop, self.restored, self.measured = None, None, [], {}
        self.fail_at = ()
        self.held_out, self.lr_factors = {}, []
        self.episodes = SimpleNamespace(is_due=lambda _step: False, write_validation=lambda _step, _episodes: None)

    def record(self, call):
        self.calls.append(call)
        if call == self.interrupt_at:
            self.loop.interrupt()
        if call in self.fail_at:
            raise EngineError(call)

    # Source

    @contextmanager
    def running(self):
        self.record("source starts")
        try:
            yield
        finally:
            self.record("source stops")

    def collect(self, step):
        self.record(f"collect {step}")
        self.loop.stop.check()
        return self.collected(step)

    def undo_collect(self):
        self.record("undo collect")

    def notify(self):
        self.record("notify")

    def interrupt_soon(self):
        self.record("interrupt soon" if not self.loop.stop.requested else "too late")

    @contextmanager
    def paused(self):
        self.record("pause")
        yield
        self.record("resume")

    def load_partial(self, unfinished):
        self.restored.append(("unfinished", tuple(unfinished)))

    # Manager, trainer and weight sync

    def abort(self):
        self.record("abort")

    def rollout(self, tasks, *, global_step, validation):
        assert validation
        self.record(f"validate {global_step}")
        return [make_episode(self.held_out.get(global_step, 0.5)) for _ in tasks]

    def collate(self, episodes):
        return episodes

    def start(self):
        self.record("sync starts")

    def finish(self):
        self.record("sync finishes")

    def before_update(self):
        self.record("before update")
        return {"switch/sleep_s": 1.0}

    def update(self, batch, *, step, version, lr_factor):
        self.lr_factors.append(lr_factor)
        self.record(f"update {step} from version {version} with {len(batch)} episodes")
        return {"actor/trained_tokens": float(len(batch)), **self.measured}

    def update_weights(self, version):
        self.record(f"weights {version}")
        return {"sync/bytes": 8.0}

    def waiting_for(self, _part):
        return nullcontext()

    # Store, log and view

    def save(self, training):
        if isinstance(training, TrainLoop):
            self.record(f"save {training.step}")
            self.saved = training.state_dict()

    def write(self, step, metrics):
        self.lines.append((step, dict(metrics)))


def make_loop(parts, *, num_steps=2, validation=0, checkpoint=0, num_held_out=0, keep=None, optimizer=None, **held_out):
    """Return a loop around parts; `keep` and `held_out` are further options of checkpoints and validations."""
    train = TrainConfig(
        num_steps=num_steps,
        optimizer=optimizer or OptimizerConfig(),
        checkpoint=CheckpointConfig(every=checkpoint, **(keep or {})),
        validation=ValidationConfig(every=validation, **held_out),
    )
    parts.state_dict = lambda: {"position": 5}
    parts.load_state_dict = lambda state, *, step: parts.restored.append(("source", state, step))
    view = SimpleNamespace(
        step=lambda *_: None,
        validation=lambda *_: None,
        warning=lambda text: parts.record(f"warning: {text.split(';')[0]}"),
        activity=lambda name: parts.record(name) or nullcontext(),
    )
    parts.loop = TrainLoop(
        setup=SimpleNamespace(train=train, validation_tasks=[TASK] * num_held_out),
        manager=parts,
        trainer=parts,
        source=parts,
        sync=parts,
        store=parts,
        episodes=parts.episodes,
        buffer=TrajectoryBuffer(2, 4),
        log=parts,
        view=view,
        stop=Interrupt(),
    )
    return parts.loop


def test_the_order_of_a_training():
    """Each step collects, updates the policy and then the engine; the source runs only between start and end."""
    parts = Parts()

    make_loop(parts).run()

    step = "before update", "update {0} from version {1} with 2 episodes", "weights {0}"
    assert parts.calls == [
        *("sync starts", "source starts"),
        *("collect 1", *(each.format(1, 0) for each in step), "notify"),
        *("collect 2", *(each.format(2, 1) for each in step), "pause", "checkpoint", "save 2", "resume", "notify"),
        *("source stops", "sync finishes"),
    ]


def test_the_episodes_of_a_step_are_written(tmp_path):
    """Each step that is due has a file with its episodes and the trainer's advantages."""
    parts = Parts(groups=lambda _step: [EpisodeGroup((make_episode(), make_episode(0.0, number=1)))])
    parts.episodes = EpisodeLog(tmp_path, every=2)
    parts.collate = lambda episodes: collate(episodes, pad_token_id=0)
    parts.advantages = lambda: np.array([[0.5], [-0.5]], np.float32)
    make_loop(parts, num_steps=4).run()

    files = sorted((tmp_path / "episodes").iterdir())
    assert ["step-00000001.parquet", "step-00000003.parquet"] == [file.name for file in files]
    for step, file in zip((1, 3), files, strict=True):
        trained = read_training_step(file)
        assert [(step, 1.0, [[0.5]]), (step, 0.0, [[-0.5]])] == [
            (each.step, each.result.reward, [values.tolist() for values in each.advantages]) for each in trained
        ]


def test_warnings_are_shown_once_and_saved():
    """The loop shows each new warning, also after a restart, and a checkpoint holds the shown ones."""
    parts = Parts()
    parts.measured = {"policy/nats": 0.7}
    make_loop(parts, num_steps=2).run()

    shown = [call for call in parts.calls if call.startswith("warning")]
    assert ["warning: step 1: the policy moved 0.70 nats a sequence in one step"] == shown
    resumed = Parts()
    resumed.measured = parts.measured
    loop = make_loop(resumed, num_steps=3)
    loop.load_state_dict(parts.saved)
    loop.run()
    assert [] == [call for call in resumed.calls if call.startswith("warning")]


@pytest.mark.parametrize("adaptive", [True, False])
def test_noise_shortens_the_next_steps(adaptive):
    """With `noise_adaptive`, the expected cosine of the steps before it multiplies the rate of a step; 0 at first."""
    parts = Parts()
    parts.measured = {"noise/agreement": 1.0, "noise/square": 4.0}

    make_loop(parts, num_steps=3, optimizer=OptimizerConfig(noise_adaptive=adaptive)).run()
    assert pytest.approx([0.0, 0.0, 0.5] if adaptive else [1.0, 1.0, 1.0]) == parts.lr_factors


@pytest.mark.slow
@given(num_steps=st.integers(1, 9), every=st.integers(0, 4))
def test_validations_and_checkpoints_that_are_due(num_steps, every):
    """Both come every so many steps and after the last one; a validation also comes before the first."""
    parts = Parts()
    loop = make_loop(parts, num_steps=num_steps, validation=every, checkpoint=every, num_held_out=1)

    loop.run()

    regular = {step for step in range(1, num_steps) if every and step % every == 0}
    assert [f"validate {step}" for step in sorted({0, *regular, num_steps})] == [
        call for call in parts.calls if call.startswith("validate")
    ]
    assert [f"save {step}" for step in sorted({*regular, num_steps})] == [
        call for call in parts.calls if call.startswith("save")
    ]
    assert {0, *regular, num_steps} == loop.validations.keys()


SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=10, max_size=10)


@pytest.mark.slow
@given(scores=SCORES, keep_best=st.booleans(), export=st.sampled_from(["last", "best"]))
def test_the_best_checkpoint_is_kept(scores, keep_best, export):
    """
    With `keep_best`, a step with a new best held-out score has a checkpoint, and the store is told to keep the best.

    The initial model has one only if it may have to be exported.
    """
    parts = Parts()
    parts.held_out = dict(enumerate(scores))
    loop = make_loop(parts, num_steps=9, validation=1, num_held_out=1, keep={"keep_best": keep_best, "export": export})

    loop.run()

    new_best = [step for step in range(10) if all(scores[step] > each for each in scores[:step])]
    wanted = {step for step in new_best if keep_best and (step or export == "best")} | {9}
    assert [f"save {step}" for step in sorted(wanted)] == [call for call in parts.calls if call.startswith("save")]
    assert (new_best[-1], new_best[-1] if keep_best else None) == (loop.best_step, loop.kept_step)


@given(scores=SCORES, patience=st.integers(1, 4))
def test_a_training_stops_early(scores, patience):
    """After `patience` validations without a new best score the training ends as after its last step."""
    parts = Parts()
    parts.held_out = dict(enumerate(scores))
    loop = make_loop(parts, num_steps=9, validation=1, num_held_out=1, patience=patience)

    loop.run()

    ends = [step for step in range(10) if max(range(step + 1), key=lambda each: scores[each]) == step - patience]
    assert (min([*ends, 9]), bool(ends)) == (loop.step, loop.stopped_early)
    assert f"save {loop.step}" in parts.calls
    assert "sync finishes" == parts.calls[-1]


def test_a_resumed_training_knows_its_best_step():
    """Best step and patience continue after a restart; a training that had stopped early makes no further step."""
    parts = Parts()
    parts.held_out = {1: 0.9}
    make_loop(parts, num_steps=9, validation=1, num_held_out=1, patience=2).run()
    resumed = Parts()
    loop = make_loop(resumed, num_steps=9, validation=1, num_held_out=1, patience=2)

    loop.load_state_dict(parts.saved)
    loop.run()

    assert (3, 1, True) == (loop.step, loop.best_step, loop.stopped_early)
    assert not [call for call in resumed.calls if call.startswith("collect")]


def test_a_validation_without_a_score_is_never_the_best():
    """If no held-out episode was scored, the mean of 0 is no score, also where the others are negative."""
    parts = Parts()
    scores = {0: (TrajectoryScore(value=-1.0),), 1: (), 2: (TrajectoryScore(value=-0.5),)}
    parts.rollout = lambda tasks, *, global_step, validation: [make_episode(scores=scores[global_step]) for _ in tasks]
    loop = make_loop(parts, validation=1, num_held_out=1)

    loop.run()

    assert 2 == loop.best_step


def test_an_unknown_score():
    """A score that no validation has stops the training before its first step, with the known names."""
    loop = make_loop(Parts(), num_held_out=1, score="reward/best")

    with pytest.raises(ConfigError, match=r"train\.validation\.score: 'reward/best' is no metric.*reward/mean"):
        loop.run()


def test_a_validation_is_limited_and_logged():
    """`validation.limit` bounds the tasks; the metrics have the prefix `validation/`, and the episodes are kept."""
    parts = Parts()
    kept = {}
    parts.episodes = SimpleNamespace(is_due=lambda _step: False, write_validation=kept.__setitem__)
    loop = make_loop(parts, num_steps=1, num_held_out=5, limit=3)

    loop.run()

    step, metrics = parts.lines[0]
    assert (0, 0.5) == (step, metrics["validation/reward/mean"])
    assert metrics == loop.validations[0]
    assert all(name.startswith("validation/") for name in metrics)
    assert {0: 3, 1: 3} == {step: len(episodes) for step, episodes in kept.items()}


def test_the_control_shuffles_each_step_differently(monkeypatch):
    """With `shuffle_rewards`, the step is the seed of the permutation; by default no reward is moved."""
    seeds = []
    monkeypatch.setattr(loop_module, "shuffle_rewards", lambda batch, seed: seeds.append(seed) or batch)
    for shuffle in (True, False):
        loop = make_loop(Parts())
        loop.setup.train = evolve(loop.setup.train, shuffle_rewards=shuffle)
        loop.run()

    assert [1, 2] == seeds


def test_a_step_without_groups_changes_no_weights():
    """If all groups were dropped, policy, engine and version stay, a warning is logged, and training continues."""
    parts = Parts(groups=lambda _step: [])
    loop = make_loop(parts)

    with capture_logs() as logs:
        loop.run()

    assert (2, 0) == (loop.step, loop.version)
    assert not [call for call in parts.calls if call.startswith(("update", "weights", "before"))]
    assert [1, 2] == [log["step"] for log in logs if log["event"] == "step without any token to train on"]


def test_failed_episodes_stop_the_training():
    """If every episode of a step failed, the engine or the agent is broken: the first cause is raised."""
    fault = Fault(owner="engine", kind="EngineError", message="out of memory")
    failed = make_episode(status=Status.FAILED, fault=fault, scores=())
    loop = make_loop(Parts(groups=lambda _step: [EpisodeGroup((failed, failed))]))

    with pytest.raises(EngineError, match="all 2 episodes failed; first failure: engine: EngineError: out of memory"):
        loop.run()


def test_the_metrics_of_a_step():
    """A line has metrics of episodes, update, sync and buffer, and seconds; overhead is a share of the step."""
    parts = Parts()
    make_loop(parts, num_steps=1).run()

    ((step, metrics),) = parts.lines
    assert 1 == step
    assert {"reward/mean": 0.5, "actor/trained_tokens": 2.0, "sync/bytes": 8.0, "version": 1.0}.items() <= (
        metrics.items()
    )
    assert {"switch/sleep_s", "buffer/taken", "buffer/staleness", "seconds/rollout", "seconds/sync"} <= metrics.keys()
    assert 0 <= metrics["seconds/overhead_share"] <= 1


@pytest.mark.parametrize(
    ("interrupt_at", "step"),
    [
        ("validate 0", 0),
        ("collect 1", 0),
        ("update 1 from version 0 with 2 episodes", 1),
        ("collect 2", 1),
        ("update 2 from version 1 with 2 episodes", 2),
    ],
)
def test_an_interrupt_ends_with_a_checkpoint(interrupt_at, step):
    """An update is completed, then a checkpoint of the last completed step is written, and then the error is raised."""
    parts = Parts()
    loop = make_loop(parts, num_held_out=1)
    parts.interrupt_at = interrupt_at

    with pytest.raises(TrainingInterruptedError, match=f"interrupted after step {step}"):
        loop.run()

    assert [f"save {step}"] == [call for call in parts.calls if call.startswith("save")]
    assert step == loop.version


@pytest.mark.parametrize(
    ("fail_at", "saved"),
    [
        ("collect 1", []),
        ("weights 1", ["save 1"]),
        ("collect 2", ["undo collect", "save 1"]),
        ("update 2 from version 1 with 2 episodes", []),
        ("weights 2", ["save 2"]),
    ],
)
def test_an_error_ends_with_a_checkpoint_of_the_last_whole_update(fail_at, saved):
    """No step is lost to an engine that fails; an update that fails leaves models of no step, which are not saved."""
    parts = Parts()
    loop = make_loop(parts)
    parts.fail_at = {fail_at}

    with pytest.raises(EngineError, match=fail_at):
        loop.run()

    assert saved == [call for call in parts.calls if call.startswith(("save", "undo"))]
    if saved:
        resumed = Parts()
        other = make_loop(resumed)
        other.load_state_dict(parts.saved)
        other.run()
        assert [f"weights {version}" for version in range(loop.step, 3)] == [
            call for call in resumed.calls if call.startswith("weights")
        ]


def test_an_error_after_a_checkpoint_writes_no_other_one():
    """Its step is on disk already; and if the disk refuses the checkpoint, the first error is raised."""
    parts = Parts()
    loop = make_loop(parts, checkpoint=1)
    parts.fail_at = {"collect 2"}
    with pytest.raises(EngineError, match="collect 2"):
        loop.run()
    assert ["save 1"] == [call for call in parts.calls if call.startswith("save")]

    parts = Parts()
    loop = make_loop(parts)
    parts.fail_at = {"collect 2", "save 1"}
    with capture_logs() as logs, pytest.raises(EngineError, match="collect 2"):
        loop.run()
    assert [("no checkpoint after the error", "EngineError: save 1")] == [(log["event"], log["error"]) for log in logs]


def test_an_interrupt_marks_episodes_before_it_aborts_them():
    """The source knows of the interrupt before the manager aborts: aborted episodes then count as unfinished."""
    parts = Parts()
    loop = make_loop(parts)

    loop.interrupt()

    assert ["interrupt soon", "abort"] == parts.calls
    assert loop.stop.requested


def test_an_interrupted_validation_is_repeated():
    """A validation that was interrupted is not logged, so a resumed training makes it again."""
    parts = Parts()
    loop = make_loop(parts, num_held_out=1)
    parts.interrupt_at = "validate 0"
    with pytest.raises(TrainingInterruptedError):
        loop.run()
    assert ([], {}) == (parts.lines, loop.validations)

    resumed = Parts()
    other = make_loop(resumed, num_held_out=1)
    other.load_state_dict(parts.saved)
    other.run()

    assert "validate 0" in resumed.calls


def test_the_state_is_restored():
    """The state survives JSON: steps, times, validations, buffer and unfinished episodes continue where they were."""
    parts = Parts()
    loop = make_loop(parts, num_held_out=1)
    loop.run()
    loop.buffer.put(make_episode(step=3))
    state = loop.state_dict()
    state = evolve(state, progress=json.loads(json.dumps(state.progress)), unfinished=("unfinished",))
    resumed = Parts()
    other = make_loop(resumed, num_held_out=1)

    with capture_logs() as logs:
        other.load_state_dict(state)

    assert (loop.step, loop.version, loop.train_s, loop.validations) == (
        other.step,
        other.version,
        other.train_s,
        other.validations,
    )
    assert [("source", {"position": 5}, 2), ("unfinished", ("unfinished",))] == resumed.restored
    assert loop.buffer.state_dict() == other.buffer.state_dict()
    assert [("training resumed", 2)] == [(log["event"], log["step"]) for log in logs]
    other.run()
    assert "validate 2" not in resumed.calls


@pytest.mark.parametrize(("version", "calls"), [(0, []), (3, ["weights 3"])])
def test_a_resume_updates_the_engine(version, calls):
    """The engine starts with the initial model; if the policy has been updated, the engine gets its weights."""
    parts = Parts()
    loop = make_loop(parts)
    loop.version = version
    resumed = Parts()

    make_loop(resumed).load_state_dict(loop.state_dict())

    assert calls == resumed.calls


def test_a_state_without_a_key():
    """A missing key is a `KeyError` with its name, which the checkpoint store reports."""
    with pytest.raises(KeyError, match="buffer"):
        make_loop(Parts()).load_state_dict(TrainingState(progress={"step": 1}))
