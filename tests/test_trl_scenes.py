"""TRL's GRPOTrainer on drawn scenes, by the command line, with the shipped vision-language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from turnwise.cli import main
from turnwise_drawn_scenes import model_dir
from turnwise_testing.references.vision_reference import VisionReference

CONFIG = str(Path(__file__).parents[1] / "examples/train_scenes.yaml")
FEW = ["rollout.n=4", "data.path=drawn_scenes:train?num_tasks=8"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_two_steps_see_the_pixels_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after a step, the trainer computes the probabilities with which the engine sampled."""
    pytest.importorskip("trl")
    from turnwise_trl_bridge import grpo

    gaps, numbers = [], []

    class Measured(grpo.TurnwiseGRPOTrainer):
        """Notes the largest gap of trained tokens, and the numbers of pictures."""

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            self.inputs = inputs
            numbers.extend(map(len, inputs["turnwise_pictures"]))
            return super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*arguments, **options)
            mask = (self.inputs["completion_mask"] * self.inputs["tool_mask"]).bool()
            gaps.append(float((found[0].detach() - self.inputs["old_per_token_logps"]).abs()[mask].max()))
            return found

    monkeypatch.setattr(grpo, "TurnwiseGRPOTrainer", Measured)
    out = tmp_path / "out"
    options = ["--steps", "2", "--prompts", "4", "--learning-rate", "0.001", "--out", str(out)]
    assert main(["trl", CONFIG, *FEW, *options]) == 0

    assert len(gaps) == 2
    assert max(gaps) < 1e-3
    assert min(numbers) == 1
    assert max(numbers) > 1, "no episode used the tool"
    assert len([each for each in json.loads((out / "log.json").read_text()) if "reward" in each]) == 2
    before, after = (load_file(folder / "model.safetensors") for folder in (model_dir(), out))
    assert any((before[name] != after[name]).any() for name in before if "visual" in name)
    assert VisionReference(out).placeholder == VisionReference(model_dir()).placeholder
    assert (out / "preprocessor_config.json").exists()


def test_the_asynchronous_trainer_refuses_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the trainer that takes them."""
    pytest.importorskip("trl.experimental.async_grpo")
    command = ["trl", CONFIG, *FEW, "--async", "--steps", "1", "--prompts", "2", "--out", str(tmp_path / "out")]
    assert main(command) != 0
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "row 0 " in line
    assert "has pictures, which TRL's AsyncGRPOTrainer has no place for: leave --async out" in line
