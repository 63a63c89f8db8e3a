"""The demo from end to end: a language model calls a real tool over several turns, run by the public command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from turnwise.cli import main
from turnwise.record.invariants import check_trajectory
from turnwise.types import Status
from turnwise_result_files import load_batch, read_results

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples" / "calculator.yaml"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """The output folder of the example, with two episodes for each of 16 tasks."""
    out = tmp_path_factory.mktemp("run") / "out"
    assert main(["rollout", str(CONFIG), "data.limit=16", "rollout.n=2", "--out", str(out)]) == 0
    return out


def test_the_model_uses_the_tool_over_several_turns(run_dir):
    """
    Nearly every episode calls the calculator, and many of them more than once.
    """
    results = read_results(run_dir / "trajectories.parquet")

    assert len(results) == 32
    assert {r.status for r in results} <= {Status.COMPLETED, Status.TRUNCATED}
    assert sum(r.status is Status.COMPLETED for r in results) >= 28
    assert sum(r.metrics.num_tool_calls > 0 for r in results) >= 28
    assert max(len(r.trajectories[0].turns()) for r in results) >= 3
    assert {r.reward for r in results} == {0.0, 1.0}
    for result in results:
        check_trajectory(result.trajectories[0])


def test_logprobs_equal_a_forward_pass_on_the_record(run_dir):
    """
    Because nothing was re-tokenised, one plain forward pass gives the log-probability of every sampled token to 1e-4.
    """
    from transformers import AutoModelForCausalLM

    from turnwise_calculator_demo import model_dir

    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()
    worst = 0.0
    for result in read_results(run_dir / "trajectories.parquet"):
        (record,) = result.trajectories
        ids = torch.tensor(record.input_ids[None].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        logprobs = torch.log_softmax(logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        response = logprobs[record.num_prompt_tokens - 1 :]
        sampled = record.response_mask == 1
        worst = max(worst, float(np.abs(response - record.logprobs)[sampled].max()))

    assert worst < 1e-4


def test_the_batch_is_what_the_trajectories_say(run_dir):
    """
    The saved batch holds the same tokens, masks, log-probabilities and rewards, in the order of the data.
    """
    batch = load_batch(run_dir / "batch.safetensors")
    by_uid = {(r.task.uid, r.rollout_n): r for r in read_results(run_dir / "trajectories.parquet")}

    assert [row.sample_index for row in batch.rows] == sorted(row.sample_index for row in batch.rows)
    for index, row in enumerate(batch.rows):
        result = by_uid[row.uid, row.rollout_n]
        (record,) = result.trajectories
        length = record.num_response_tokens
        assert batch.responses[index, :length].tolist() == record.response_ids.tolist()
        assert batch.response_mask[index, :length].tolist() == record.response_mask.tolist()
        assert batch.rollout_log_probs[index, :length].numpy().tolist() == record.logprobs.tolist()
        assert float(batch.rm_scores[index].sum()) == result.reward
        assert int(batch.rm_scores[index].nonzero()[0]) == length - 1 if result.reward else True


def test_the_metrics_count_what_happened(run_dir):
    """
    The metrics agree with the trajectories.
    """
    metrics = json.loads((run_dir / "metrics.json").read_text())
    results = read_results(run_dir / "trajectories.parquet")

    assert metrics["episodes"] == len(results)
    assert metrics["num_tool_calls"] == sum(r.metrics.num_tool_calls for r in results)
    assert metrics["reward"]["mean"] == pytest.approx(np.mean([r.reward for r in results]))
