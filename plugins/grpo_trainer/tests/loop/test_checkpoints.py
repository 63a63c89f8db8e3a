"""Checkpoints are complete or absent, whenever the process is killed, and hold every episode not yet trained on."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore, UnfinishedEpisode
from turnwise.errors import ConfigError, DataError
from turnwise.record.spec import EpisodeSpec
from turnwise_grpo_trainer.loop import checkpoints
from turnwise_grpo_trainer.loop.checkpoints import PROGRESS_FILE, CheckpointStore, TrainingState, parse_step
from turnwise_grpo_trainer.loop.checksums import CHECKSUMS_FILE


def make_task(uid):
    """Return a task."""
    return Task(messages=({"role": "user", "content": "?"},), uid=uid)


def make_episode(uid, number):
    """Return a finished episode of one sampled token."""
    record = Trajectory([1, 2])
    record.add_action([3], [-0.5])
    return EpisodeResult(
        task=make_task(uid),
        rollout_n=number,
        status=Status.COMPLETED,
        trajectories=(record,),
        scores=(TrajectoryScore(value=float(number)),),
    )


def make_unfinished(uid, number):
    """Return an interrupted episode."""
    return UnfinishedEpisode(spec=EpisodeSpec(task=make_task(uid), agent_name="a", rollout_n=number))


@define(eq=False)
class FakeTraining:
    """A training whose whole state follows from its step."""

    step: int = 0
    restored: dict = field(factory=dict)
    kept_step: int | None = None

    def save_models(self, folder):
        folder.mkdir()
        (folder / "weights").write_text(str(self.step))

    def load_models(self, folder):
        self.restored["models"] = int((folder / "weights").read_text())

    def state_dict(self):
        return TrainingState(
            progress={"step": self.step},
            waiting=[make_episode(f"w{self.step}", number) for number in range(self.step % 3)],
            partial=[make_episode(f"p{self.step}", number) for number in range(self.step % 2)],
            unfinished=[make_unfinished(f"u{self.step}", number) for number in range(self.step % 4)],
        )

    def load_state_dict(self, state):
        self.restored |= {
            "step": state.progress["step"],
            "waiting": [each.uid for each in state.waiting],
            "partial": [each.uid for each in state.partial],
            "unfinished": [each.uid for each in state.unfinished],
        }


def restore(store, folder):
    """Load a checkpoint, check that its parts belong together, and return its step."""
    training = FakeTraining()
    store.load(training, folder)
    step = training.restored["step"]
    assert training.restored == {
        "models": step,
        "step": step,
        "waiting": [f"w{step}/{number}" for number in range(step % 3)],
        "partial": [f"p{step}/{number}" for number in range(step % 2)],
        "unfinished": [f"u{step}/{number}" for number in range(step % 4)],
    }
    assert step == parse_step(folder)
    return step


class Killed(BaseException):
    """The process was killed."""


@contextmanager
def kill_after(num_operations):
    """Allow this many file operations; every later one fails, as in a killed process. None allows all."""
    done = 0

    def count():
        nonlocal done
        if done == num_operations:
            raise Killed
        done += 1

    def counted(function):
        def call(*arguments, **options):
            count()
            return function(*arguments, **options)

        return call

    real_rmtree = shutil.rmtree

    def torn_rmtree(path, ignore_errors=False):
        """Remove one file, and then the rest: a kill in between leaves a part of the folder."""
        count()
        for file in sorted(Path(path).glob("*.json")):
            file.unlink()
        count()
        real_rmtree(path, ignore_errors=ignore_errors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(shutil, "rmtree", torn_rmtree)
        patch.setattr(Path, "mkdir", counted(Path.mkdir))
        patch.setattr(Path, "write_text", counted(Path.write_text))
        patch.setattr(checkpoints, "save_unfinished", counted(checkpoints.save_unfinished))
        with suppress(Killed):
            yield


SAVES = st.lists(
    st.tuples(st.integers(0, 2), st.one_of(st.none(), st.integers(0, 24))),  # steps since the last save, and the kill
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@given(saves=SAVES, keep_last=st.integers(1, 3))
@settings(max_examples=40)
def test_a_kill_never_costs_a_saved_step(saves, keep_last):
    """
    Killed between any two file operations of a save, a training resumes at least from its last completed save.

    Every checkpoint that is listed is complete, also when a step was saved again, and when old ones were removed.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, training, completed = CheckpointStore(Path(folder), keep_last), FakeTraining(), None
        for num_steps, kill in saves:
            training.step += num_steps
            saved = None
            with kill_after(kill):
                saved = store.save(training)
            store.recover_interrupted_save()
            completed = training.step if saved is not None else completed
            steps = [restore(store, path) for path in store.paths()]
            assert steps == sorted(set(steps))
            if completed is not None:
                assert max(steps) >= completed
            # After a kill the process resumes from the latest checkpoint.
            training.step = max(steps, default=0)
        if saved is not None:
            assert len(steps) <= keep_last


@pytest.mark.many_cases(1)
@pytest.mark.parametrize("step", [5, 6], ids=["the same step", "the next step, and the first is removed"])
def test_a_kill_at_each_operation_of_a_second_save(tmp_path, step):
    """Whichever file operation is the last, a listed checkpoint is complete, and there is at least one."""
    for kill in range(40):
        store = CheckpointStore(tmp_path / str(kill), keep_last=1)
        store.out.mkdir()
        store.save(FakeTraining(step=5))
        finished = False
        with kill_after(kill):
            store.save(FakeTraining(step=step))
            finished = True
        store.recover_interrupted_save()

        assert [restore(store, path) for path in store.paths()] in ([5], [5, step], [step])
        assert [] == [path.name for path in store.folder.iterdir() if path.suffix in (".replaced", ".removed")]
        if finished:
            assert [step] == [restore(store, path) for path in store.paths()]
            return
    raise AssertionError("a save has more file operations than expected")


def test_only_the_last_ones_are_kept(tmp_path):
    """`keep_last` checkpoints stay, the newest ones, in the order of their steps."""
    store = CheckpointStore(tmp_path, 2)
    for step in (1, 9, 10, 11):
        store.save(FakeTraining(step=step))

    assert ["step-00000010", "step-00000011"] == [path.name for path in store.paths()]
    assert "step-00000011" == store.latest().name


def test_the_best_checkpoint_stays(tmp_path):
    """The best checkpoint is kept beside the last ones, and found by a later process."""
    store = CheckpointStore(tmp_path, 2)
    for step in (1, 2, 3, 4, 5):
        store.save(FakeTraining(step=step, kept_step=min(step, 2)))

    assert [2, 4, 5] == [restore(store, path) for path in store.paths()]
    assert "step-00000002" == CheckpointStore(tmp_path).best().name


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (None, "had no held-out score to choose it by"),
        (0, "the initial model has the best held-out score"),
        (7, "step-00000007 is missing"),
    ],
)
def test_no_best_checkpoint(tmp_path, kept, reason):
    """Without a best checkpoint, the error gives the reason in one line."""
    store = CheckpointStore(tmp_path)
    with pytest.raises(ConfigError, match="has no checkpoint"):
        store.best()

    store.save(FakeTraining(step=9, kept_step=kept))

    with pytest.raises(ConfigError, match=f"has no best checkpoint: .*{reason}"):
        store.best()


def test_no_checkpoint(tmp_path):
    """Without a folder there is no checkpoint, and incomplete ones do not count."""
    store = CheckpointStore(tmp_path)
    assert ([], None) == (store.paths(), store.latest())

    (store.folder / "step-00000001.partial").mkdir(parents=True)
    (store.folder / "step-1").mkdir()
    assert ([], None) == (store.paths(), store.latest())


def test_an_interrupted_replacement_is_rolled_back(tmp_path):
    """Killed after the old checkpoint of a step was moved aside, the old one gets its name back."""
    store = CheckpointStore(tmp_path)
    for name in ("step-00000001", "step-00000002.replaced", "step-00000001.replaced", "step-00000002.partial"):
        (store.folder / name).mkdir(parents=True)

    store.recover_interrupted_save()

    assert ["step-00000001", "step-00000002"] == [path.name for path in store.paths()]
    assert not list(store.folder.glob("*.replaced"))


def test_other_files_are_never_removed(tmp_path):
    """Removing all checkpoints leaves other folders beside them."""
    store = CheckpointStore(tmp_path)
    store.save(FakeTraining(step=1))
    (store.folder / "step-00000002.partial").mkdir()
    thesis = store.folder / "thesis" / "weights"
    thesis.parent.mkdir()
    thesis.write_text("mine")

    store.remove_all()

    assert ["thesis"] == [path.name for path in store.folder.iterdir()]
    assert "mine" == thesis.read_text()


@pytest.mark.many_cases
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "not a checkpoint of a training: loop.json: .*No such file"),
        ("{", "not a checkpoint of a training: loop.json: Expecting"),
        *((text, "loop.json: expected an object") for text in ("[]", "null", '"x"', "3", "NaN")),
        ("[" * 100_000, "not a checkpoint of a training: loop.json: "),
        *(
            (f'{{"{name}": {value}}}', f"loop.json: {name} is ")
            for name in ("step", "version", "kept_step", "train_s", "validations", "health", "source", "buffer")
            for value in ("NaN", '"x"', "-1", "true", "[1]")
        ),
        ('{"step": 1.5}', "loop.json: step is 1.5, expected a whole number from 0"),
        ('{"step": Infinity}', "loop.json: step is inf"),
        ("{}", "not a checkpoint of a training: loop.json has no key 'step'"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(tmp_path, text, message):
    """A progress file that is missing, is not JSON or lacks a key is named in one line."""
    store = CheckpointStore(tmp_path)
    folder = store.save(FakeTraining(step=1))
    (folder / PROGRESS_FILE).unlink()
    if text is not None:
        (folder / PROGRESS_FILE).write_text(text)
    (folder / CHECKSUMS_FILE).unlink()

    with pytest.raises(ConfigError, match=message) as caught:
        store.load(FakeTraining(), folder)
    assert str(caught.value).startswith(f"{folder}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["waiting.parquet", "unfinished.jsonl"])
def test_damaged_episodes_are_found_before_the_models_are_loaded(tmp_path, name):
    """An unreadable file of episodes is named, and nothing of the checkpoint is restored."""
    store, training = CheckpointStore(tmp_path), FakeTraining()
    folder = store.save(FakeTraining(step=1))
    (folder / name).write_text("hello")

    with pytest.raises(DataError, match=name):
        store.load(training, folder)
    assert {} == training.restored


def test_a_state_that_does_not_fit_names_the_checkpoint(tmp_path):
    """A refusal by the training becomes a config error with the checkpoint's path."""

    class OtherTraining(FakeTraining):
        def load_state_dict(self, state):
            raise ValueError("checkpoint was written with rollout.n=8, but the config has rollout.n=4")

    store = CheckpointStore(tmp_path)
    folder = store.save(FakeTraining(step=1))

    with pytest.raises(ConfigError, match=r"step-00000001: checkpoint was written with rollout\.n=8"):
        store.load(OtherTraining(), folder)


def test_progress_is_plain_json(tmp_path):
    """The progress file needs nothing but JSON to be read."""
    folder = CheckpointStore(tmp_path).save(FakeTraining(step=3))

    assert {"step": 3, "kept_step": None, "has_checksums": True} == json.loads((folder / PROGRESS_FILE).read_text())
