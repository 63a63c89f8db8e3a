"""A checkpoint with any changed file is refused before it is loaded, in one line that names the file."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore, UnfinishedEpisode
from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise.plugin.host import load
from turnwise.record.spec import EpisodeSpec
from turnwise_grpo_trainer.build import build_learner_spec
from turnwise_grpo_trainer.learner.model_state import save_state
from turnwise_grpo_trainer.loop.checkpoints import PROGRESS_FILE, CheckpointStore, TrainingState, check_checkpoint
from turnwise_grpo_trainer.loop.checksums import CHECKSUMS_FILE, check_files, write_checksums
from turnwise_grpo_trainer.processes.sharding import load_local_trainer
from turnwise_grpo_trainer.report.run_config import save_config
from turnwise_grpo_trainer.train_setup import read_setup

EXAMPLE = str(Path(__file__).parents[4] / "examples/train_calculator.yaml")


def make_task(uid: str) -> Task:
    return Task(messages=({"role": "user", "content": "?"},), uid=uid)


def make_episode(uid: str) -> EpisodeResult:
    record = Trajectory([1, 2])
    record.add_action([3], [-0.5])
    scores = (TrajectoryScore(value=1.0),)
    return EpisodeResult(task=make_task(uid), status=Status.COMPLETED, trajectories=(record,), scores=scores)


class FakeTraining:
    """A training at its second step, whose models are those of a learner."""

    step = 2
    kept_step = 2

    def __init__(self, learner: object) -> None:
        self.learner = learner

    def save_models(self, folder: Path) -> None:
        save_state(self.learner, folder)

    def state_dict(self) -> TrainingState:
        return TrainingState(
            progress={"step": 2, "validations": []},
            waiting=[make_episode("w")],
            partial=[make_episode("p")],
            unfinished=[UnfinishedEpisode(spec=EpisodeSpec(task=make_task("u"), agent_name="a", rollout_n=1))],
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training with one checkpoint, whose optimizer has a state."""
    out = tmp_path_factory.mktemp("run")
    setup = read_setup(EXAMPLE, ("train.policy.device=cpu",))
    save_config(setup.run, out)
    learner = load_local_trainer(build_learner_spec(setup)).learner
    for weight in learner.policy.model.parameters():
        weight.grad = torch.zeros_like(weight)
    learner.policy.optimizer.step()
    CheckpointStore(out).save(FakeTraining(learner))
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    return out


@pytest.fixture(scope="module", autouse=True)
def one_host():
    """Load the plugins once: every command would look for them again, which takes longer than to run."""
    with pytest.MonkeyPatch.context() as patch:
        host = load()
        for module in ("turnwise.cli", "turnwise.config.resolve"):
            patch.setattr(f"{module}.load", lambda *_arguments, **_options: host)
        yield


def checkpoint_of(out: Path) -> Path:
    (folder,) = CheckpointStore(out).paths()
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(file: Path, at: int = -1) -> None:
    """Invert a byte, as a share of a billion of the file's size; by default the one in its middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at < 0 else at * len(data) // 10**9] ^= 0xFF
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def extend(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def exchange_four_bytes(file: Path) -> None:
    data = file.read_bytes()
    middle = len(data) // 2
    file.write_bytes(data[:middle] + bytes(4) + b"\x01" + data[middle + 5 :])


CHANGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": cut,
    "extended": extend,
    "emptied": lambda file: file.write_bytes(b""),
    "overwritten": exchange_four_bytes,
    "removed": Path.unlink,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a broken link": lambda file: (file.unlink(), file.symlink_to("nowhere")),
}


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("command", ["export", "train"])
def test_no_command_reads_a_changed_checkpoint(trained, tmp_path, capfd, change, command):
    """Whichever file was changed, each command that reads a checkpoint exits with 2 and a line, and writes nothing."""
    names = [file.relative_to(trained) for file in files_of(checkpoint_of(trained))]
    assert len(names) >= 8
    for number, name in enumerate(names):
        out = tmp_path / str(number)
        shutil.copytree(trained, out)
        CHANGES[change](out / name)
        before = {file: file.read_bytes() for file in files_of(out)}
        words = ["export", str(out), "--to", str(tmp_path / "model")]
        if command == "train":
            words = ["train", EXAMPLE, "train.policy.device=cpu", "--out", str(out), "--resume"]

        code = main(words)

        error = capfd.readouterr().err
        assert (2, 1) == (code, error.count("\n")), error
        assert error.startswith(f"turnwise: error: {checkpoint_of(out)}"), error
        assert Path(name).name in error
        after = {file: file.read_bytes() for file in files_of(out) if not file.name.startswith(".")}
        assert before == after
        assert not (tmp_path / "model").exists()


@given(st.data())
def test_any_byte_of_any_file(trained, data):
    """A byte that has another value, and any end that is missing, is found in every file."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / checkpoint_of(trained).name
        shutil.copytree(checkpoint_of(trained), copy)
        file = data.draw(st.sampled_from(files_of(copy)))
        content = file.read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        other = data.draw(st.integers(0, 255).filter(lambda value: value != content[at]))
        file.write_bytes(data.draw(st.sampled_from([content[:at], content[:at] + bytes([other]) + content[at + 1 :]])))

        with pytest.raises(ConfigError, match=file.name):
            check_checkpoint(copy)

        file.write_bytes(content)
        check_checkpoint(copy)


def test_an_added_file_is_refused(trained, tmp_path):
    """It could be read as a part of the checkpoint; hidden files, which file systems make, could not."""
    copy = tmp_path / "step-00000002"
    shutil.copytree(checkpoint_of(trained), copy)
    (copy / "trainer" / ".nfs0001").write_text("")
    check_checkpoint(copy)
    (copy / "trainer" / "more.safetensors").write_text("")

    with pytest.raises(ConfigError, match=r"trainer/more\.safetensors is not a file of this checkpoint"):
        check_checkpoint(copy)


def test_a_checkpoint_without_checksums(trained, tmp_path):
    """An old one is read, with one line in the log; a later one is refused."""
    copy = tmp_path / "step-00000002"
    shutil.copytree(checkpoint_of(trained), copy)
    (copy / CHECKSUMS_FILE).unlink()
    with pytest.raises(ConfigError, match=r"checksums\.json is missing"):
        check_checkpoint(copy)
    progress = json.loads((copy / PROGRESS_FILE).read_text())
    (copy / PROGRESS_FILE).write_text(json.dumps({key: progress[key] for key in progress if key != "has_checksums"}))

    with capture_logs() as lines:
        check_checkpoint(copy)

    (line,) = lines
    assert ("warning", str(copy)) == (line["log_level"], line["path"])


def test_a_file_without_checksum_is_not_read(trained, tmp_path):
    """The progress alone is compared as well, because it names the best checkpoint."""
    copy = tmp_path / "step-00000002"
    shutil.copytree(checkpoint_of(trained), copy)
    assert check_files(copy, only=PROGRESS_FILE)
    progress = (copy / PROGRESS_FILE).rename(tmp_path / PROGRESS_FILE)
    write_checksums(copy)
    progress.rename(copy / PROGRESS_FILE)

    with pytest.raises(ConfigError, match=r"the checksum of loop\.json is missing"):
        check_files(copy, only=PROGRESS_FILE)
