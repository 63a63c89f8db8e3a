"""`turnwise train` on the command line: output folders, errors, and interrupts."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.plugin.registry import NoConfig
from turnwise.protocols import Resources
from turnwise_grpo_trainer.commands import training
from turnwise_grpo_trainer.commands.train_command import TrainCommand, prepare_out
from turnwise_grpo_trainer.loop.checkpoints import CheckpointStore
from turnwise_grpo_trainer.loop.interrupts import Interrupt, TrainingInterruptedError, handle_signals
from turnwise_grpo_trainer.report.metric_log import METRICS_FILE
from turnwise_grpo_trainer.train_setup import read_setup

ROOT = Path(__file__).parents[4]
CONFIG = ROOT / "examples" / "train_calculator.yaml"


@pytest.fixture
def train(monkeypatch):
    """Run `turnwise train` on the example config, with a function in place of the training."""

    def run(run_training, *arguments):
        monkeypatch.setattr(training, "run_training", run_training)
        return main(["train", str(CONFIG), *arguments])

    return run


def no_training(_setup, _out, *, resume):
    """Fail the test."""
    raise AssertionError("the training was started")


def make_checkpoint(out, step=1):
    """Create a checkpoint, empty but complete."""
    folder = out / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    return folder


def test_a_new_folder_is_created(train, tmp_path):
    """The training gets the folder, which exists, and whether to resume."""
    started = []

    def record(setup, out, *, resume):
        started.append((setup.train.num_steps, out, out.is_dir(), resume))

    out = tmp_path / "runs" / "new"
    assert 0 == train(record, "--out", str(out), "train.num_steps=5")
    assert [(5, out, True, False)] == started


def test_the_control_is_an_override(train, tmp_path):
    """`--shuffle-rewards` sets `train.shuffle_rewards`, and is off by default."""
    seen = []

    def record(setup, _out, *, resume):
        seen.append(setup.train.shuffle_rewards)

    assert 0 == train(record, "--out", str(tmp_path / "a"), "--shuffle-rewards")
    assert 0 == train(record, "--out", str(tmp_path / "b"))
    assert [True, False] == seen


def test_an_interrupt_says_how_to_continue(train, tmp_path, capsys):
    """The exit code is 130, and the last line has the command that resumes the training."""

    def interrupted(_setup, _out, *, resume):
        raise TrainingInterruptedError("interrupted after step 3")

    assert 130 == train(interrupted, "--out", str(tmp_path))
    assert (
        f"turnwise: interrupted after step 3; to continue: turnwise train CONFIG --out {tmp_path} --resume\n"
        == capsys.readouterr().err
    )


def test_no_output_folder(train, capsys):
    """Without --out nothing is trained, and the error names both ways out."""
    assert 2 == train(no_training)
    assert "turnwise: error: --out: missing; name an output folder, or add --dry-run\n" == capsys.readouterr().err


def test_a_dry_run_prints_the_plan(train, tmp_path, monkeypatch, capsys):
    """`--dry-run` needs no folder, starts nothing and writes nothing."""
    monkeypatch.chdir(tmp_path)

    assert 0 == train(no_training, "--dry-run", "train.tasks_per_step=4", "rollout.n=3")
    assert "4 tasks x 3 = 12 episodes" in capsys.readouterr().out
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [METRICS_FILE, "checkpoints"])
def test_a_folder_with_another_training_is_refused(train, tmp_path, capsys, name):
    """A log or checkpoints of another training stay as they are, unless an option says otherwise."""
    make_checkpoint(tmp_path)
    if name == METRICS_FILE:
        (tmp_path / METRICS_FILE).touch()

    assert 2 == train(no_training, "--out", str(tmp_path))
    assert (
        f"turnwise: error: --out {tmp_path}: holds another training ({name}); add --resume to continue it, or"
        " --overwrite\n" == capsys.readouterr().err
    )


def test_a_file_in_place_of_the_folder(train, tmp_path, capsys):
    """A file is no output folder."""
    out = tmp_path / "file"
    out.touch()

    assert 2 == train(no_training, "--out", str(out))
    assert f"turnwise: error: --out {out}: File exists\n" == capsys.readouterr().err
    assert 2 == train(no_training, "--out", str(out), "--resume")
    assert f"turnwise: error: --out {out}: File exists\n" == capsys.readouterr().err


def test_a_folder_that_cannot_be_made(train, tmp_path, capsys):
    """One line, before anything runs."""
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "out", Path("/proc/x"), tmp_path / ("x" * 300)):
        assert 2 == train(no_training, "--out", str(out))
        assert capsys.readouterr().err.startswith(f"turnwise: error: --out {out}: ")


def test_a_full_disk(train, tmp_path, capsys):
    """A device without space refuses a file: one line with the hint. Another error of the system is a defect."""

    def fill(_setup, _out, *, resume):
        with open("/dev/full", "w", encoding="utf-8") as file:
            file.write("x")

    def miss(_setup, _out, *, resume):
        (tmp_path / "missing").read_text(encoding="utf-8")

    out = tmp_path / "out"
    assert 2 == train(fill, "--out", str(out))
    hint = f"turnwise train CONFIG --out {out} --resume continues from the latest checkpoint"
    expected = f"turnwise: error: {out}: cannot be written: No space left on device; {hint}\n"
    assert expected == capsys.readouterr().err
    assert 1 == train(miss, "--out", str(out))
    assert "FileNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_a_second_training_is_refused(train, tmp_path, capsys, option):
    """While one training writes to a folder, another changes nothing in it; afterwards the folder is free."""
    out = tmp_path / "out"

    def during_the_first(_setup, _out, *, resume):
        make_checkpoint(out).rename(out / "checkpoints" / "step-00000001.replaced")
        assert 2 == train(no_training, "--out", str(out), option)
        assert f"turnwise: error: {out}: another run writes to this folder\n" == capsys.readouterr().err
        assert (out / "checkpoints" / "step-00000001.replaced").exists()

    assert 0 == train(during_the_first, "--out", str(out))
    assert 0 == train(lambda *_args, **_options: None, "--out", str(out), option)


@pytest.mark.parametrize("there", [None, (), (METRICS_FILE,), ("checkpoints/step-00000001.partial",)])
def test_a_job_may_always_resume(train, tmp_path, there):
    """Without a whole checkpoint, as after a kill during the first one, the training starts at step 0."""
    out, started = tmp_path / "out", []
    if there is not None:
        out.mkdir()
    for name in there or ():
        (out / name).touch() if name == METRICS_FILE else (out / name).mkdir(parents=True)

    assert 0 == train(lambda *_args, resume: started.append(resume), "--out", str(out), "--resume")
    assert [False] == started


def test_a_trained_model_without_a_checkpoint_is_kept(train, tmp_path, capsys):
    """A training that has ended, and whose checkpoints somebody removed, is not trained again without a word."""
    (tmp_path / "model").mkdir()
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')

    assert 2 == train(no_training, "--out", str(tmp_path), "--resume")
    assert "has a trained model, but no checkpoint; add --overwrite to train again" in capsys.readouterr().err


def test_resume_recovers_from_a_crash(tmp_path):
    """A checkpoint that was moved aside when the process was killed counts as the checkpoint to resume from."""
    make_checkpoint(tmp_path).rename(tmp_path / "checkpoints" / "step-00000001.replaced")

    assert prepare_out(tmp_path, overwrite=False, resume=True)

    assert "step-00000001" == CheckpointStore(tmp_path).latest().name


def test_overwrite_keeps_the_old_checkpoints_at_first(tmp_path):
    """They are removed by the training, after everything has loaded: a failure before that costs nothing."""
    checkpoint = make_checkpoint(tmp_path)

    prepare_out(tmp_path, overwrite=True, resume=False)

    assert checkpoint.exists()


def test_examples_in_the_help(monkeypatch):
    """The examples parse, and their overrides are valid."""
    parser = argparse.ArgumentParser()
    TrainCommand(NoConfig(), Resources()).add_arguments(parser)
    monkeypatch.chdir(ROOT)

    lines = [line for line in parser.epilog.splitlines() if line.startswith("  turnwise train")]
    options = [parser.parse_args(shlex.split(line)[2:]) for line in lines]
    steps = [read_setup(each.config, each.overrides).train.num_steps for each in options]

    assert 4 == len(lines)
    assert 5 == steps[2]


def test_a_missing_package_names_the_extra(train, tmp_path, monkeypatch, capsys):
    """Without torch, the error is one line with the command that installs it."""
    for name in [each for each in sys.modules if each.startswith("turnwise_grpo_trainer.")]:
        if name.rpartition(".")[2] not in ("train_command", "eval_command", "interrupts"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)

    assert 2 == main(["train", str(CONFIG), "--out", str(tmp_path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert "turnwise: error: turnwise train needs torch: pip install 'turnwise-grpo-trainer[train]'" == line


@pytest.fixture
def usual_handler():
    """Python's own handler of SIGINT; a shell that starts the tests in the background has the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_handler")
def test_the_first_signal_asks_and_the_second_acts(capsys):
    """The first Ctrl-C calls the function; the second one raises as usual."""
    calls = []

    with handle_signals(lambda: calls.append("interrupt")):
        os.kill(os.getpid(), signal.SIGINT)
        assert ["interrupt"] == calls
        assert "interrupt again to exit without one" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

    assert ["interrupt"] == calls


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_interrupt(sent):
    """SIGTERM and SIGHUP call the function as Ctrl-C does, and the old handlers are back at the end."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    calls = []

    with handle_signals(lambda: calls.append("interrupt")):
        os.kill(os.getpid(), sent)

    assert ["interrupt"] == calls
    assert before == {each: signal.getsignal(each) for each in before}


def test_signals_outside_the_main_thread():
    """In another thread, which receives no signals, the handlers stay as they are."""
    before, seen = signal.getsignal(signal.SIGINT), []

    def body():
        with handle_signals(lambda: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()

    assert [before] == seen


def test_an_interrupt_is_checked_where_the_work_allows_it():
    """`check` raises only after a request."""
    interrupt = Interrupt()
    interrupt.check()
    interrupt.requested = True

    with pytest.raises(TrainingInterruptedError):
        interrupt.check()


@pytest.mark.slow
def test_a_text_model_has_no_vision_tower_to_freeze(tmp_path, capsys):
    """The error is one line that names the option and the model's class."""
    assert main(["train", str(CONFIG), "--out", str(tmp_path / "out"), "train.policy.freeze_vision=true"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith(
        "turnwise: error: train.policy.freeze_vision: Qwen3ForCausalLM has no vision tower that is known"
    )
