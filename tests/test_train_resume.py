"""A training that is killed or interrupted, wherever it stands, goes on as if nothing had been."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from turnwise import load_unfinished, read_results
from turnwise_grpo_trainer.checkpoints import checkpoints_of, mend

sys.path.insert(0, str(Path(__file__).parent))

from training_site import assert_same, make_site, started, train, write_tasks


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder to train in."""
    return make_site(tmp_path)


def cut_short(site: Path, name: str, what: str, *more: str) -> Path:
    """Train until the process has sent itself a signal: SIGKILL, or one that it answers with a checkpoint."""
    kind = what.split()[0]
    out = site / name
    resume = ["--resume"] if checkpoints_of(out) else []
    process = started(
        site, "train", str(site / "config.yaml"), *more, "--out", str(out), *resume, TURNWISE_TEST_SIGNAL=what
    )
    said = process.communicate()
    assert (-signal.SIGKILL if kind == "SIGKILL" else 130) == process.returncode, said
    assert not (out / "report.md").exists()
    return out


def killed_while_writing(site: Path, name: str, step: int) -> None:
    """Train, and kill the process while a checkpoint is being written."""
    out = site / name
    partial = out / "checkpoints" / f"step-{step:08d}.partial"
    process = started(site, "train", str(site / "config.yaml"), "--out", str(out), "--resume")
    while not partial.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_killed_and_resumed(site: Path) -> None:
    """
    Interrupted and killed again and again, a training in mode `sync` ends with the bits of one that was not.

    A step has 9 turns here, a validation 10. An event counts from the start of its process.
    """
    whole = train(site, "whole")

    # In the rollout of step 2, behind the second of nine turns; three are under way at once.
    slowly = ("engine.latency_s=0.2", "rollout.max_in_flight=3", "rollout.deadlines.abort_grace_s=0.001")
    out = cut_short(site, "cut", "SIGINT on_turn_finished 21", *slowly)
    (latest,) = checkpoints_of(out)
    finished = finished_in(latest)
    unfinished = [each.uid for each in load_unfinished(latest / "unfinished.jsonl")]
    assert "step-00000001" == latest.name
    assert 9 == len({*finished, *unfinished}) == len(finished) + len(unfinished)
    assert finished
    assert unfinished
    for what in (
        "SIGKILL on_turn_finished 2",  # in what is left of that rollout
        "SIGKILL on_weights_updated 2",  # behind the update of step 2; the first one is that of the resume
        "SIGKILL on_metrics_logged 1",  # behind its line in the log, before its checkpoint
    ):
        assert latest in checkpoints_of(cut_short(site, "cut", what))
    killed_while_writing(site, "cut", 2)
    cut_short(site, "cut", "SIGKILL on_reward_finished 12")  # in step 3, or in the validation behind it
    cut_short(site, "cut", "SIGTERM on_weights_updated 2")  # answered at the end of the step

    assert_same(whole, train(site, "cut", "--resume"))
    assert learnt_by(whole) == learnt_by(out)


@pytest.mark.slow
def test_interrupted_on_shared_devices(site: Path) -> None:
    """`hybrid` stands where `sync` stands, also when it was interrupted in a rollout and in a validation."""
    whole = train(site, "whole", "train.num_steps=2")

    hybrid = ("train.mode=hybrid", "train.num_steps=2")
    slowly = ("engine.latency_s=0.2", "rollout.max_in_flight=3", "rollout.deadlines.abort_grace_s=0.001")
    out = cut_short(site, "cut", "SIGINT on_turn_finished 2", *hybrid, *slowly)
    assert ["step-00000000"] == [path.name for path in checkpoints_of(out)]
    cut_short(site, "cut", "SIGINT on_turn_finished 21", *hybrid, *slowly)

    train(site, "cut", *hybrid, "--resume")
    one, two = (load_file(each / "model" / "model.safetensors") for each in (whole, out))
    assert all((one[name] == two[name]).all() for name in one)
    assert learnt_by(whole) == learnt_by(out)


def finished_in(checkpoint: Path) -> list[str]:
    """Return the episodes that had finished and that nothing was learnt from yet."""
    paths = [checkpoint / f"{name}.parquet" for name in ("waiting", "partial")]
    return [each.uid for path in paths if path.exists() for each in read_results(path)]


def learnt_by(out: Path) -> dict[int, list[str]]:
    """Return the episodes that each step learnt from; of a step that was made again, the last time counts."""
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
    "engine.latency_s=2",
    "rollout.deadlines.abort_grace_s=0.05",
    "data.validation_path=null",
)


def account_of(out: Path) -> tuple[Counter[str], set[str], int]:
    """Return how often each episode was learnt from or is kept in the checkpoint; those cut; groups begun."""
    (latest,) = checkpoints_of(out)
    state = json.loads((latest / "loop.json").read_text())
    learnt = learnt_by(out) if (out / "learnt.jsonl").exists() else {}
    found = Counter(uid for step, episodes in learnt.items() if step <= state["step"] for uid in episodes)
    found.update(finished_in(latest))
    cut = {each.uid for each in load_unfinished(latest / "unfinished.jsonl")}
    found.update(cut)
    return found, cut, state["launched"]


@pytest.mark.slow
def test_async_loses_nothing(site: Path) -> None:
    """Killed and interrupted in mode `async`, every episode is learnt from once or kept."""
    write_tasks(site / "tasks.jsonl", 60)  # more than are begun, so that each comes once

    kept = set()
    for what in (
        "SIGKILL on_turn_finished 25",  # at most 24 end before the second update, which follows a checkpoint
        "SIGTERM on_turn_finished 9",
        "SIGKILL on_turn_finished 6",
        "",
    ):
        if what:
            out = cut_short(site, "out", what, *ASYNC)
        else:
            out = train(site, "out", *ASYNC, "--resume")
        found, cut, launched = account_of(out)
        kept |= cut
        assert {1} == set(found.values()), found
        assert 3 * launched == len(found)
        assert launched == len({uid.partition("/")[0] for uid in found})

    assert kept, "no checkpoint held an episode that was under way"
    learnt = learnt_by(out)
    assert list(range(1, 9)) == sorted(learnt)
    assert kept & {uid for episodes in learnt.values() for uid in episodes}, "none that was cut was learnt from"


def test_a_replaced_checkpoint_is_not_lost(tmp_path: Path) -> None:
    """Killed between taking the old one of a step away and naming the new one, the old one is there."""
    folder = tmp_path / "checkpoints"
    for name in ("step-00000001", "step-00000002.replaced", "step-00000001.replaced", "step-00000002.partial"):
        (folder / name).mkdir(parents=True)

    mend(tmp_path)

    assert ["step-00000001", "step-00000002"] == [path.name for path in checkpoints_of(tmp_path)]
    assert not list(folder.glob("*.replaced"))
