"""A few steps of training on the shell tasks, with a tiny random model: mechanics, and no learning."""

from __future__ import annotations

import json
import shutil

import pytest
from agent_runs import call, run_cli, write_run
from boxes import why_no_boxes
from task_folders import EXAMPLES

from turnwise_testing.inputs.tokenizers import byte_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes()),
]
SOLVE = "f=$(grep -rl '^reason:' logs); (echo \"$f\"; sed -n 's/^reason: //p' \"$f\") > answer.txt"
TURNS = (call("shell", command=SOLVE) + call("submit"), "Done.")


def test_a_training_on_shell_tasks(tmp_path):
    """The rewards of the hidden tests reach the trainer, which updates the model in each of two steps."""
    random_qwen3 = pytest.importorskip("turnwise_testing.references.reference_model").random_qwen3
    shutil.copytree(EXAMPLES, tmp_path / "tasks")
    write_run(
        tmp_path,
        TURNS,
        {"tools": ["shell", "submit"]},
        data={"path": "harbor:tasks?tasks=find-a-file,fix-a-bug"},
        reward="workspace_tests",
        rollout={"n": 2, "prompt_length": 8192, "response_length": 4096},
        train={
            "num_steps": 2,
            "tasks_per_step": 2,
            "optimizer": {"lr": 1e-4},
            "policy": {"device": "cpu"},
            "algorithm": {"adv_estimator": "reinforce_plus_plus"},  # all episodes of a scripted task are alike
            "checkpoint": {"every": 2},
        },
    )
    tokenizer = byte_tokenizer()
    random_qwen3(len(tokenizer)).save_pretrained(tmp_path / "model")

    done = run_cli(tmp_path, "train", "run.yaml", "--out", "out")

    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert [line["reward/mean"] for line in steps] == [0.5, 0.5]  # one of the two tasks is solved
    load_file = pytest.importorskip("safetensors.numpy").load_file
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out/model"))
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)
