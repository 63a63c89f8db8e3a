"""Distillation from the command line: teachers, refusals, files of episodes, Ray, and a resume."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_site import assert_same, make_site, run, start, steps_of, train

from turnwise import EpisodeResult
from turnwise_calculator_demo import model_dir
from turnwise_result_files import read_results

RAY = pytest.param(("runtime=ray", "runtime.num_workers=2"), marks=[pytest.mark.slow, pytest.mark.ray], id="ray")
SHARDED = pytest.param(("train.sharding.num_processes=2",), marks=[pytest.mark.slow, pytest.mark.ray], id="sharded")


def make_teacher(folder: Path, seed: int = 1, swapped: tuple[int, int] | None = None) -> Path:
    """Write a small random model with the tokenizer of the calculator's, perhaps with two tokens swapped."""
    import torch
    from transformers import AutoTokenizer

    from turnwise_tiny_models import tiny_qwen3
    from turnwise_tiny_models.model import save

    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    torch.manual_seed(seed)
    save(tiny_qwen3(tokenizer, hidden_size=64, num_layers=2), tokenizer, folder)
    if swapped:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        names = {number: name for name, number in vocabulary.items()}
        one, other = swapped
        vocabulary[names[one]], vocabulary[names[other]] = other, one
        file.write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder to train in, with a teacher."""
    make_site(tmp_path)
    make_teacher(tmp_path / "teacher")
    return tmp_path


def options(loss: str, teacher: str = "{name: teacher, path: teacher, top_k: 3}") -> tuple[str, ...]:
    """Return overrides of a training of two steps that learns from a teacher."""
    return (f"train.scorers=[{teacher}]", f"train.loss={loss}", "train.num_steps=2", "train.checkpoint.every=0")


def episodes_of(out: Path, step: int) -> list[EpisodeResult]:
    """Return the episodes that a step trained on."""
    return list(read_results(out / f"episodes/step-{step:08d}.parquet"))


def teacher_values(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Return the teacher's log-probability of each token but the first, by one plain forward pass."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor(ids.astype(np.int64))[None]
    with torch.no_grad():
        each = model(input_ids=tokens).logits[0].log_softmax(-1)
    values: np.ndarray = each[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
    return values


def assert_scored(episode: EpisodeResult, teacher: Path) -> None:
    """The sampled tokens have the teacher's values, and no other token has one."""
    (record,) = episode.trajectories
    values, sampled = record.column("teacher_logprobs"), record.response_mask == 1
    expected = teacher_values(teacher, record.input_ids)[record.num_prompt_tokens - 1 :]
    np.testing.assert_allclose(values[sampled], expected[sampled], atol=2e-4)
    assert np.isnan(values[~sampled]).all()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", [pytest.param((), id="local"), RAY, SHARDED])
@pytest.mark.parametrize("loss", ["reverse_kl", "topk_kl"])
def test_a_training_by_the_command_line(site: Path, loss: str, runtime: tuple[str, ...]) -> None:
    """The files of episodes have the teacher's values, and the metrics have the divergence from it."""
    out = train(site, "out", *options(loss), *runtime)

    first, second = episodes_of(out, 1), episodes_of(out, 2)
    assert 9 == len(first) == len(second)
    for episode in (first[0], first[-1], second[0]):
        assert_scored(episode, site / "teacher")
    (record,) = first[0].trajectories
    assert (record.num_response_tokens, 3) == record.column("teacher_topk_ids").shape
    measured = [line for line in steps_of(out) if "reward/mean" in line]
    name = "teacher_kl" if loss == "reverse_kl" else "topk_kl"
    assert all(line[f"actor/{name}"] > 0 for line in measured)
    assert [line["actor/trained_tokens"] for line in measured] == [line["actor/measured_tokens"] for line in measured]
    if not runtime:
        sampled = [each.trajectories[0].column("teacher_logprobs") for each in first]
        gap = [each.trajectories[0].logprobs - own for each, own in zip(first, sampled, strict=True)]
        if loss == "reverse_kl":
            assert np.nanmean(np.concatenate(gap)) == pytest.approx(measured[0]["actor/teacher_kl"], rel=1e-4)


@pytest.mark.slow
def test_masks_do_not_change(site: Path) -> None:
    """The first step has the same tokens, masks and rewards with a teacher as without one."""
    with_teacher = train(site, "with", *options("reverse_kl"), "train.num_steps=1")
    without = train(site, "without", "train.num_steps=1")

    for one, other in zip(episodes_of(with_teacher, 1), episodes_of(without, 1), strict=True):
        assert (one.uid, one.scores, one.status) == (other.uid, other.scores, other.status)
        (scored,), (plain,) = one.trajectories, other.trajectories
        assert {} == dict(plain.columns)
        for name in ("input_ids", "response_mask", "logprobs", "weight_versions"):
            np.testing.assert_array_equal(getattr(scored, name), getattr(plain, name))


def refused(site: Path, *arguments: str) -> str:
    """Run a training that must exit with code 2, and return its one line of error."""
    process = start(site, "train", str(site / "config.yaml"), *arguments)
    _, err = process.communicate()
    assert 2 == process.returncode, err
    (line,) = [line for line in err.splitlines() if line.startswith("turnwise: error:")]
    assert "Traceback" not in err
    return line


@pytest.mark.slow
@pytest.mark.parametrize("dry", [True, False])
def test_another_tokenizer(site: Path, dry: bool) -> None:
    """It is refused with the first token that differs, by a plan too."""
    make_teacher(site / "other", swapped=(70, 90))
    ways = ("--dry-run",) if dry else ("--out", str(site / "out"))
    line = refused(site, *options("reverse_kl", "{name: teacher, path: other}"), *ways)

    vocabulary = json.loads((model_dir() / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    names = {number: name for name, number in vocabulary.items()}
    assert f"differs from the policy's: id 70 is {names[70]!r} for the policy and {names[90]!r} for the teacher" in line
    assert not (site / "out" / "metrics.jsonl").exists()


REFUSED = [
    ("{name: teacher}", "train.scorers.0.path: must be set for one teacher, or 'teachers' for several, and not both"),
    ("{name: teacher, path: nowhere}", "is not a model directory: it has no config.json"),
    ("{name: teacher, path: teacher, top_k: 1000}", "top_k is 1000, and the tokenizer has "),
    ("{name: teachr, path: teacher}", "train.scorers.0: unknown scorer 'teachr'; did you mean 'teacher'?"),
    ("{name: teacher, path: teacher, topk: 3}", "train.scorers.0.topk: unknown key; did you mean 'top_k'?"),
    ("{name: teacher, teachers: {math: teacher}}", "has '' in its column 'data_source'; there are teachers for 'math'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("teacher", "text"), REFUSED)
def test_refusals(site: Path, teacher: str, text: str) -> None:
    """A bad option, a missing folder and a task without a teacher are one line, before anything starts."""
    assert text in refused(site, *options("reverse_kl", teacher), "--dry-run")


COLUMNS = [
    (
        ("train.loss=topk_kl", "train.scorers=[{name: teacher, path: teacher}]"),
        "train.loss: it reads the column 'teacher_topk_ids', and train.scorers fill 'teacher_logprobs'; add a scorer",
    ),
    (
        ("train.loss=reverse_kl", "train.scorers=[{name: teacher, path: teacher}, {name: teacher, path: teacher}]"),
        "train.scorers: 2 scorers fill the column 'teacher_logprobs'; keep one of them",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "text"), COLUMNS, ids=["no scorer fills it", "two scorers fill it"])
def test_columns_are_checked_first(site: Path, overrides: tuple[str, ...], text: str) -> None:
    """A plan refuses scorers and a loss that do not fit, before a rollout is made for them."""
    assert text in refused(site, *overrides, "--dry-run")


@pytest.mark.slow
def test_a_loss_without_its_column(site: Path) -> None:
    """The update says which column it lacks."""
    assert "it reads the column 'teacher_logprobs', which no record of the batch has; add a scorer" in refused(
        site, "train.loss=reverse_kl", "--out", str(site / "out")
    )


@pytest.mark.slow
def test_several_teachers(site: Path) -> None:
    """A column of the task chooses its teacher."""
    make_teacher(site / "second", seed=2)
    tasks = [json.loads(line) for line in (site / "tasks.jsonl").read_text().splitlines()]
    kinds = {each["uid"]: ("one", "two")[number % 2] for number, each in enumerate(tasks)}
    lines = [json.dumps({**each, "kind": kinds[each["uid"]]}) for each in tasks]
    (site / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    both = "{name: teacher, column: kind, teachers: {one: teacher, two: second}}"
    out = train(site, "out", *options("reverse_kl", both))

    found = {kinds[each.task.uid]: each for each in [*episodes_of(out, 1), *episodes_of(out, 2)]}
    assert {"one", "two"} == found.keys()
    assert_scored(found["one"], site / "teacher")
    assert_scored(found["two"], site / "second")


@pytest.mark.slow
def test_killed_and_resumed(site: Path) -> None:
    """A training that was killed after an update, and in a rollout, ends with the same bits and the same columns."""
    overrides = (*options("reverse_kl"), "train.num_steps=3", "train.checkpoint.every=1")
    whole = train(site, "whole", *overrides)
    for trigger in ("SIGKILL on_weights_updated 2", "SIGKILL on_turn_finished 4"):
        resume = ["--resume"] if (site / "cut").exists() else []
        process = start(
            site,
            *("train", str(site / "config.yaml"), *overrides, "--out", str(site / "cut"), *resume),
            TURNWISE_TEST_SIGNAL=trigger,
        )
        output = process.communicate()
        assert -signal.SIGKILL == process.returncode, output
    cut = train(site, "cut", *overrides, "--resume")

    assert_same(whole, cut)
    for step in (1, 2, 3):
        for one, other in zip(episodes_of(whole, step), episodes_of(cut, step), strict=True):
            assert one.uid == other.uid
            for name in ("teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs"):
                values = [each.trajectories[0].column(name) for each in (one, other)]
                np.testing.assert_array_equal(*values)


@pytest.mark.slow
def test_the_saved_config_finds_its_teacher(site: Path) -> None:
    """The config in the folder of a training names the teacher by an absolute path."""
    out = train(site, "out", *options("reverse_kl"), "train.num_steps=1")
    output = run(site, "train", str(out / "config.yaml"), "--dry-run")

    assert "plan" in output
    assert f"path: {site / 'teacher'}" in (out / "config.yaml").read_text()


@pytest.mark.slow
def test_the_policy_approaches_its_teacher(site: Path) -> None:
    """Without any weight of the reward, the divergence from the teacher falls to less than a half."""
    (site / "tasks.jsonl").write_text((site / "tasks.jsonl").read_text().splitlines()[0] + "\n")
    few = ("train.num_steps=20", "train.tasks_per_step=1", "rollout.n=24")
    out = train(site, "out", *options("reverse_kl"), *few)

    found: list[Any] = [line["actor/teacher_kl"] for line in steps_of(out) if "reward/mean" in line]
    assert np.mean(found[-3:]) < found[0] / 2
