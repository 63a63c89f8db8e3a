"""A training that is killed or interrupted at any point resumes without losing or repeating an episode."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from torch.distributed.checkpoint import save
from training_site import assert_same, make_site, run, start, train, write_tasks

from turnwise_grpo_trainer.loop.checkpoints import CheckpointStore
from turnwise_grpo_trainer.loop.checksums import CHECKSUMS_FILE, write_checksums
from turnwise_result_files import load_unfinished, read_results


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder to train in."""
    return make_site(tmp_path)


def train_until_signal(site: Path, name: str, trigger: str, *more: str) -> Path:
    """
    Train until the process sends itself a signal: SIGKILL, or one that it handles by writing a checkpoint.

    Args:
        site: see `make_site`.
        name: output folder; a training in it is resumed.
        trigger: signal, event of the run, and how many such events to wait for.
        more: overrides.
    """
    kind = trigger.split()[0]
    out = site / name
    resume = ["--resume"] if CheckpointStore(out).paths() else []
    process = start(
        site, "train", str(site / "config.yaml"), *more, "--out", str(out), *resume, TURNWISE_TEST_SIGNAL=trigger
    )
    output = process.communicate()
    assert (-signal.SIGKILL if kind == "SIGKILL" else 130) == process.returncode, output
    assert not (out / "report.md").exists()
    return out


def kill_during_save(site: Path, name: str, step: int) -> None:
    """Resume a training, and kill the process while it writes the checkpoint of a step, or soon after."""
    out = site / name
    whole = out / "checkpoints" / f"step-{step:08d}"
    process = start(site, "train", str(site / "config.yaml"), "--out", str(out), "--resume")
    while not (whole.with_name(f"{whole.name}.partial").exists() or whole.exists()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_killed_and_resumed(site: Path) -> None:
    """
    Interrupted and killed repeatedly, a training in mode `sync` ends with the same bits as an undisturbed one.

    A step has 9 turns here, a validation 10. Events are counted from the start of each process.
    """
    whole = train(site, "whole")

    # In the rollout of step 2, after the second of nine turns; three episodes run at once.
    slowly = ("engine.latency_s=0.2", "rollout.max_in_flight=3", "rollout.deadlines.abort_grace_s=0.001")
    out = train_until_signal(site, "cut", "SIGINT on_turn_finished 21", *slowly)
    (latest,) = CheckpointStore(out).paths()
    finished = finished_in(latest)
    unfinished = [each.uid for each in load_unfinished(latest / "unfinished.jsonl")]
    assert "step-00000001" == latest.name
    assert 9 == len({*finished, *unfinished}) == len(finished) + len(unfinished)
    assert finished
    assert unfinished
    for trigger in (
        "SIGKILL on_turn_finished 2",  # in the rest of that rollout
        "SIGKILL on_weights_updated 2",  # after the update of step 2; the resume makes the first update
        "SIGKILL on_metrics_logged 1",  # after its line in the log, before its checkpoint
    ):
        assert latest in CheckpointStore(train_until_signal(site, "cut", trigger)).paths()
    kill_during_save(site, "cut", 2)
    train_until_signal(site, "cut", "SIGKILL on_reward_finished 12")  # in step 3, or in the validation after it
    train_until_signal(site, "cut", "SIGTERM on_weights_updated 2")  # handled at the end of the step

    assert_same(whole, train(site, "cut", "--resume"))
    assert trained_on(whole) == trained_on(out)


@pytest.mark.slow
def test_interrupted_on_shared_devices(site: Path) -> None:
    """On shared devices the training learns the same bits, also interrupted in a rollout and in a validation."""
    whole = train(site, "whole", "train.num_steps=2")

    hybrid = ("memory.mode=hybrid", "train.num_steps=2")
    slowly = ("engine.latency_s=0.2", "rollout.max_in_flight=3", "rollout.deadlines.abort_grace_s=0.001")
    out = train_until_signal(site, "cut", "SIGINT on_turn_finished 2", *hybrid, *slowly)
    assert ["step-00000000"] == [path.name for path in CheckpointStore(out).paths()]
    train_until_signal(site, "cut", "SIGINT on_turn_finished 21", *hybrid, *slowly)

    train(site, "cut", *hybrid, "--resume")
    one, two = (load_file(each / "model" / "model.safetensors") for each in (whole, out))
    assert all((one[name] == two[name]).all() for name in one)
    assert trained_on(whole) == trained_on(out)


@pytest.mark.slow
def test_an_engine_that_refuses_weights_costs_no_step(site: Path) -> None:
    """The update that the engine refused is in a checkpoint, and the resumed training ends with the same bits."""
    few = ("train.num_steps=2", "train.checkpoint.every=0", "data.validation_path=null")
    whole = train(site, "whole", *few)

    out = site / "cut"
    command = ("train", str(site / "config.yaml"), *few, "--out", str(out))
    process = start(site, *command, "engine.refused_version=1")
    _, error = process.communicate()
    assert 1 == process.returncode, error
    assert "no room for the weights" in error
    assert ["step-00000001"] == [path.name for path in CheckpointStore(out).paths()]

    train(site, "cut", *few, "--resume")
    one, two = (load_file(each / "model" / "model.safetensors") for each in (whole, out))
    assert all((one[name] == two[name]).all() for name in one)
    assert trained_on(whole)[2] == trained_on(out)[2]  # step 1 ended before its episodes were logged


def finished_in(checkpoint: Path) -> list[str]:
    """Return the finished episodes of a checkpoint, which were not trained on yet."""
    paths = [checkpoint / f"{name}.parquet" for name in ("waiting", "partial")]
    return [each.uid for path in paths if path.exists() for each in read_results(path)]


def trained_on(out: Path) -> dict[int, list[str]]:
    """Return the episodes that each step trained on; if a step was repeated, its last execution counts."""
    lines = [json.loads(line) for line in (out / "learnt.jsonl").read_text().splitlines()]
    return {line["step"]: line["episodes"] for line in lines}


ASYNC = (
    "train.mode=async",
    "train.num_steps=8",
    "train.tasks_per_step=2",
    "train.buffer.max_staleness=2",
    "train.buffer.stale=correct",
    "train.checkpoint.keep_last=1",
    "train.buffer.max_groups=6",
    # Every checkpoint interrupts a held episode, however fast this machine is. Of six groups in flight two are held,
    # and a step needs two others.
    "engine.hold_every=3",
    "rollout.deadlines.abort_grace_s=0.05",
    "data.validation_path=null",
)


def count_episodes(out: Path) -> tuple[Counter[str], set[str], int]:
    """
    Account for every episode of a training.

    Returns:
        How often each episode was trained on or is kept in the checkpoint; the interrupted ones; launched groups.
    """
    latest = CheckpointStore(out).latest()  # a kill may come before the older one is removed
    assert latest is not None
    progress = json.loads((latest / "loop.json").read_text())
    trained = trained_on(out) if (out / "learnt.jsonl").exists() else {}
    found = Counter(uid for step, episodes in trained.items() if step <= progress["step"] for uid in episodes)
    found.update(finished_in(latest))
    unfinished = {each.uid for each in load_unfinished(latest / "unfinished.jsonl")}
    found.update(unfinished)
    return found, unfinished, progress["source"]["launched"]


@pytest.mark.slow
def test_async_loses_nothing(site: Path) -> None:
    """Killed and interrupted in mode `async`, every episode is trained on once or kept."""
    write_tasks(site / "tasks.jsonl", 60)  # more than are launched, so each occurs once

    kept = set()
    for trigger in (
        "SIGKILL on_turn_finished 25",  # at most 24 finish before the second update, which follows a checkpoint
        "SIGTERM on_turn_finished 9",
        "SIGKILL on_turn_finished 6",
        "",
    ):
        if trigger:
            out = train_until_signal(site, "out", trigger, *ASYNC)
        else:
            out = train(site, "out", *ASYNC, "--resume")
        found, unfinished, launched = count_episodes(out)
        kept |= unfinished
        assert {1} == set(found.values()), found
        assert 3 * launched == len(found)
        assert launched == len({uid.partition("/")[0] for uid in found})

    assert kept, "no checkpoint held an interrupted episode"
    trained = trained_on(out)
    assert list(range(1, 9)) == sorted(trained)
    assert kept & {uid for episodes in trained.values() for uid in episodes}, "no interrupted episode was trained on"


def lora_of_rank(rank: int) -> tuple[str, ...]:
    """Return overrides that train adapters of a rank."""
    return ("train.num_steps=1", "data.validation_path=null", f"train.lora.rank={rank}")


@pytest.mark.slow
def test_a_refused_resume_changes_no_file(site: Path) -> None:
    """
    The folder keeps its config, metrics and episodes, so the good checkpoint can still be exported.

    It also has files of a later step, as after a kill. A refused resume must keep them.
    """
    short = lora_of_rank(4)
    out, tasks = train(site, "out", *short), site / "tasks.jsonl"
    (checkpoint,) = CheckpointStore(out).paths()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    shutil.copy(out / "episodes" / "step-00000001.parquet", out / "episodes" / "step-00000002.parquet")

    def assert_refused(reason: str, *overrides: str) -> None:
        before = contents(out)
        process = start(site, "train", str(site / "config.yaml"), *overrides, "--out", str(out), "--resume")
        output = "".join(process.communicate())
        assert 2 == process.returncode, output
        assert reason in output
        assert before == contents(out)

    def assert_change_refused(file: Path, content: str, reason: str) -> None:
        original = file.read_text()
        file.write_text(content)
        if file.is_relative_to(checkpoint):
            write_checksums(checkpoint)
        assert_refused(reason, *short)
        file.write_text(original)
        if file.is_relative_to(checkpoint):
            write_checksums(checkpoint)

    assert_refused("lora_A", *lora_of_rank(8))
    assert_change_refused(tasks, tasks.read_text().replace("3 + 1", "4 + 1"), "have changed since the checkpoint")
    assert_change_refused(checkpoint / "loop.json", '{"step": 1}', "has no key")
    metrics = out / "metrics.jsonl"
    assert_change_refused(metrics, metrics.read_text() + "no metrics\n", "not the metrics of a training")

    exported = run(site, "export", str(out), "--to", str(site / "exported"))
    assert (site / "exported" / "adapter_config.json").exists(), exported
    assert "rank: 4" in (out / "config.yaml").read_text()


def contents(out: Path) -> dict[str, bytes]:
    """Return the bytes of each file of a training."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


class Bomb:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_forged_checkpoint_runs_nothing(site: Path) -> None:
    """It is refused when a file is a pickle that runs a command, and when the models have torch's default format."""
    exploded, out = site / "exploded", train(site, "out", "train.num_steps=1", "data.validation_path=null")
    forged = pickle.dumps(Bomb(exploded))
    (checkpoint,) = CheckpointStore(out).paths()

    def assert_refused() -> None:
        process = start(site, "train", str(site / "config.yaml"), "train.num_steps=1", "--out", str(out), "--resume")
        output = "".join(process.communicate())
        assert 2 == process.returncode, output
        assert f"{checkpoint}" in output
        refusals = ("not a checkpoint of", "cannot be read", "was changed")
        assert any(each in output for each in refusals), output
        assert "Traceback" not in output
        assert not exploded.exists()

    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert {".json", ".jsonl", ".safetensors"} <= {path.suffix for path in files}
    for file in files:
        content = file.read_bytes()
        file.write_bytes(forged)
        if file.name != CHECKSUMS_FILE:
            write_checksums(checkpoint)  # as a forger would
        assert_refused()
        file.write_bytes(content)
        write_checksums(checkpoint)

    (shard,) = checkpoint.rglob("*.safetensors")
    shard.unlink()
    save({"rng": torch.get_rng_state()}, checkpoint_id=shard.parent, no_dist=True)
    (shard.parent / ".metadata").write_bytes(forged)
    write_checksums(checkpoint)
    assert_refused()
    pickle.loads(forged)
    assert exploded.exists()
