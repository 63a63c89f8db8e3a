"""Parallel thinking on real input: the agent, the embedded engine, the tiny model and the public command."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import turnwise_parallel_thinking
from turnwise import RolloutManager, Status
from turnwise.batch.rollout_batch import collate
from turnwise.cli import main
from turnwise.config.file import load_config
from turnwise.layout import Objective
from turnwise_result_files import read_results
from turnwise_task_files import load_tasks
from turnwise_testing.references.dense import token_logprobs

CONFIG = Path(__file__).parent.parent / "examples" / "parallel_thinking.yaml"


@pytest.fixture(scope="module")
def model():
    """The shipped model, as a trainer loads it."""
    torch.set_num_threads(1)
    path = turnwise_parallel_thinking.model_dir()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of the example, by the public command."""
    folder = tmp_path_factory.mktemp("runs") / "parallel"
    assert 0 == main(["rollout", str(CONFIG), "data.limit=12", "rollout.n=2", "--out", str(folder)])
    return folder


def blocks_of(trajectory):
    """Return how many blocks a record has."""
    return len({segment.block for segment in trajectory.segments if segment.block >= 0})


def test_the_model_opens_blocks(run):
    """Two, three and five numbers open no, one and two blocks, and most answers are right."""
    results = read_results(run)
    wanted = {2: 0, 3: 1, 5: 2}
    as_taught = [wanted[r.task.extra["extra_info"]["num_numbers"]] == blocks_of(r.trajectories[0]) for r in results]

    assert 24 == len(results)
    assert np.mean(as_taught) > 0.9
    assert np.mean([result.reward > 0 for result in results]) > 0.5
    assert {Objective.EXACT} == {result.objective for result in results}


def test_sampled_is_trained(run, model):
    """The training forward under the layout gives every sampled token the same log-probability."""
    for result in read_results(run):
        (trajectory,) = result.trajectories
        own = trajectory.response_mask == 1
        expected = token_logprobs(model, trajectory)[trajectory.num_prompt_tokens :]
        np.testing.assert_allclose(trajectory.logprobs[own], expected[own], atol=1e-4, rtol=0)


def test_paths_and_mask_are_shown(run, capsys, tmp_path):
    """`turnwise show` prints paths side by side, and `turnwise mask` draws the mask."""
    results = sorted(read_results(run), key=lambda r: (r.task.sample_index, r.task.uid, r.rollout_n))
    index = next(i for i, result in enumerate(results) if result.trajectories[0].has_blocks)
    assert 0 == main(["show", str(run), str(index), "--no-color"])
    assert 0 == main(["mask", str(run), str(index), "--out", str(tmp_path / "mask.png")])

    shown = capsys.readouterr().out
    assert all(f"path {i}" in shown for i in range(3))
    assert (tmp_path / "mask.png").stat().st_size > 0


def test_expanded_rows_are_what_was_sampled(model):
    """On plain text every row is a plain sequence with the sampled log-probabilities."""
    config = load_config(CONFIG, ["agent.objective=expanded", "data.limit=6", "rollout.n=1"])
    with RolloutManager.from_config(config) as manager:
        results = manager.rollout(load_tasks(config))
        batch = collate(results, pad_token_id=0).as_int64()

    assert {Status.COMPLETED} == {result.status for result in results}
    assert len(batch) > len(results)
    assert {"expanded", ""} == set(batch.column("objective"))
    with torch.no_grad():
        logits = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
        ).logits
    first = batch.prompt_length - 1
    logprobs = logits[:, first:-1].log_softmax(-1).gather(-1, batch.responses[..., None])[..., 0]
    difference = (logprobs - batch.rollout_log_probs)[batch.response_mask.bool()].abs()
    assert difference.max() < 1e-4


@pytest.mark.parametrize("options", [["agent.num_paths=1"], ["agent.num_paths=8"], ["agent.max_path_tokens=3"]])
def test_other_numbers(options, model):
    """One path, eight paths and paths that reach their cap finish without error and with exact log-probabilities."""
    config = load_config(CONFIG, [*options, "data.limit=4", "rollout.n=1"])
    with RolloutManager.from_config(config) as manager:
        results = manager.rollout(load_tasks(config))

    for result in results:
        assert result.status in (Status.COMPLETED, Status.TRUNCATED), result.fault
        (trajectory,) = result.trajectories
        own = trajectory.response_mask == 1
        expected = token_logprobs(model, trajectory)[trajectory.num_prompt_tokens :]
        np.testing.assert_allclose(trajectory.logprobs[own], expected[own], atol=1e-4, rtol=0)
