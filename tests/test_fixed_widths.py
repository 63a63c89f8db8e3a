"""Batches of fixed width from a config: in files, from a manager, and in a trainer's own batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise import RolloutBatch, RolloutManager, load_config
from turnwise.cli import main
from turnwise_result_files import load_batch
from turnwise_task_files import load_tasks
from turnwise_testing.whole_runs.scripted_run import SITE, environment_of, write_scripted_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a scripted run, whose prompts and responses are shorter than 64 tokens."""
    write_scripted_run(tmp_path, num_tasks=2)
    monkeypatch.syspath_prepend(tmp_path / SITE)
    monkeypatch.setenv("PYTHONPATH", environment_of(tmp_path)["PYTHONPATH"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def widths_of(batch: RolloutBatch) -> tuple[int, int]:
    return batch.prompt_length, batch.response_length


@pytest.mark.parametrize("fixed", [False, True])
def test_the_batch_of_a_rollout_has_the_widths_of_the_config(folder: Path, fixed: bool) -> None:
    """The file is padded to the two lengths, or to the longest row; the tokens are the same."""
    assert main(["rollout", "run.yaml", f"rollout.fixed_widths={str(fixed).lower()}", "--out", "out"]) == 0

    batch = load_batch(folder / "out/batch.safetensors")

    longest = int(batch.prompt_lens.max()), int(batch.response_lens.max())
    assert max(longest) < 64
    assert widths_of(batch) == ((64, 64) if fixed else longest)


@pytest.mark.parametrize("fixed", [False, True])
def test_the_batch_of_a_manager_has_the_widths_of_the_config(folder: Path, fixed: bool) -> None:
    """All batches of a training have one shape; attention and masks leave the pads out."""
    config = load_config("run.yaml", [f"rollout.fixed_widths={str(fixed).lower()}", "rollout.response_length=80"])
    with RolloutManager.from_config(config) as manager:
        shapes = {widths_of(manager.generate(load_tasks(config)[i : i + 1], global_step=i)) for i in range(2)}
        batch = manager.generate(load_tasks(config))

    if fixed:
        assert shapes == {widths_of(batch)} == {(64, 80)}
    assert int(batch.attention_mask.sum()) == int(batch.prompt_lens.sum() + batch.response_lens.sum())
    assert not bool(batch.response_mask[batch.attention_mask[:, batch.prompt_length :] == 0].any())
