"""A vision-language model fine-tuned on its own good episodes with pictures, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from turnwise.cli import main
from turnwise_drawn_scenes import model_dir
from turnwise_result_files import read_results
from turnwise_testing.references.vision_reference import VisionReference

CONFIG = str(Path(__file__).parents[1] / "examples/train_scenes.yaml")
FEW = ["rollout.n=8", "data.path=drawn_scenes:train?num_tasks=8"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_good_episodes_are_learned(tmp_path: Path) -> None:
    """
    The rows are the records of the episodes with reward 1, with the pictures of tools.

    The first loss is that of plain forward passes over them, and it falls.
    """
    pytest.importorskip("trl")
    rows, out = tmp_path / "sft.parquet", tmp_path / "tuned"
    assert main(["rollout", CONFIG, *FEW, "--out", str(tmp_path / "run")]) == 0
    assert main(["convert", str(tmp_path / "run"), "--to", "sft", "--min-reward", "1", "--out", str(rows)]) == 0
    options = ["--epochs", "5", "--batch-size", "64", "--learning-rate", "0.001", "--out", str(out)]
    assert main(["sft", str(rows), "--model", str(model_dir()), *options]) == 0

    good = [result.trajectories[0] for result in read_results(tmp_path / "run") if result.reward == 1]
    made = pq.read_table(rows).to_pylist()
    assert sorted(row["input_ids"] for row in made) == sorted(record.input_ids.tolist() for record in good)
    assert any(len(row["pictures"]) > 1 for row in made), "no episode used the tool"
    reference, scores = VisionReference(model_dir()), []
    for record in good:
        ids, first = record.input_ids.tolist(), record.num_prompt_tokens
        found, _best = reference.scores(ids, first, temperature=1.0, variant=0, pictures=record.pictures)
        scores.append(found[record.response_mask.astype(bool)])
    log = [entry["loss"] for entry in json.loads((out / "log.json").read_text()) if "loss" in entry]
    assert log[0] == pytest.approx(-np.concatenate(scores).mean(), abs=2e-3)
    assert log[-1] < log[0]
    assert main(["rollout", CONFIG, *FEW, f"model.path={out}", "data.limit=1", "--out", str(tmp_path / "again")]) == 0
