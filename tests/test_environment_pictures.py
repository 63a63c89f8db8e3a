"""An environment that draws its state, by the command line: what the model sees is recorded and trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from picture_rollouts import CAT, roll_out, write_run
from training_site import make_site, run, steps_of, train

from turnwise_result_files import read_results
from turnwise_testing.inputs.vision import QWEN_3_VL
from turnwise_testing.references.vision_reference import VisionReference
from turnwise_tiny_models import save_random_vision

WALK = Path(__file__).parents[1] / "plugins/environments/tests/grid_walk.py"
AGENT = {"name": "environment", "environment": "./grid_walk.py:GridWalk", "max_turns": 3}

pytestmark = pytest.mark.usefixtures("starts_a_process")


def make_walk(folder: Path) -> Path:
    """Write a run whose model never names a direction, so that each turn is followed by the grid as it was."""
    shutil.copy(WALK, folder)
    sections = {"modules": ["./grid_walk.py"], "tools": [], "parser": None, "agent": AGENT}
    plugins = ["scripted_kit", "pictures", "environments"]
    return write_run(folder, engine={"name": "seeing", "num_calls": 0, "log": ""}, plugins=plugins, **sections)


def test_a_walk_is_recorded(tmp_path: Path) -> None:
    """The picture of the task, and the grid behind the question and behind each turn but the last."""
    done = roll_out(tmp_path, make_walk(tmp_path))
    assert done.returncode == 0, done.stderr
    results = read_results(tmp_path / "out")
    assert len(results) == 4
    for result in results:
        assert str(result.status) == "completed"
        (record,) = result.trajectories
        cat, *drawn = [place.picture for place in record.pictures]
        assert cat.data == CAT.data
        assert len(drawn) == 3
        assert len({picture.key for picture in drawn}) == 1
        assert (tmp_path / "out" / "media" / drawn[0].file_name).read_bytes() == drawn[0].data
        texts = [part["text"] for part in result.messages[2]["content"] if part["type"] == "text"]
        assert texts == ["Name a direction."]


@pytest.mark.slow
def test_the_number_of_pictures(tmp_path: Path) -> None:
    """An observation with one more ends its episode at the limit."""
    done = roll_out(tmp_path, make_walk(tmp_path), "rollout.max_pictures=2")
    assert done.returncode == 0, done.stderr
    for result in read_results(tmp_path / "out"):
        assert result.limit is not None
        assert (str(result.status), result.limit.name) == ("truncated", "rollout.max_pictures")
        assert len(result.trajectories[0].pictures) == 2


@pytest.mark.slow
def test_a_training_in_an_environment_with_pictures(tmp_path: Path) -> None:
    """Sampled tokens have the probabilities of a plain forward pass, and the trainer computes the same."""
    make_site(tmp_path)
    shutil.copy(WALK, tmp_path)
    save_random_vision("qwen2_5_vl", tmp_path / "model", text="What is shown?", chat_template=QWEN_3_VL)
    options = (
        "model.path=model",
        "modules=[./grid_walk.py]",
        f"agent={json.dumps(AGENT)}",
        "reward=reported",
        "engine={name: transformers, device: cpu, max_context: 384}",
        "rollout.prompt_length=160",
        "rollout.response_length=224",
        "rollout.sampling={temperature: 1.0, max_tokens: 8}",
        "observers=[]",
        "postprocessors=[]",
        "train.num_steps=2",
    )
    output = run(tmp_path, "rollout", str(tmp_path / "config.yaml"), *options, "--out", str(tmp_path / "rolled"))
    results = read_results(tmp_path / "rolled")
    assert len(results) == 15, output
    reference = VisionReference(tmp_path / "model")
    for result in results:
        assert result.fault is None
        (record,) = result.trajectories
        first, ids = record.num_prompt_tokens, record.input_ids.tolist()
        scores, _best = reference.scores(ids, first, temperature=1.0, variant=0, pictures=record.pictures)
        sampled = record.response_mask.astype(bool)
        np.testing.assert_allclose(record.logprobs[sampled], scores[sampled], atol=1e-4, rtol=0)
    assert max(len(result.trajectories[0].pictures) for result in results) > 1

    steps = [line for line in steps_of(train(tmp_path, "out", *options)) if "gap/max" in line]
    assert len(steps) == 2
    assert all(line["gap/max"] < 1e-4 for line in steps)
