"""Tests of an engine that serves a real model through `turnwise rollout`: models by hub id, GGUF files, own options."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import pytest

from turnwise import Trajectory
from turnwise_result_files import read_results
from turnwise_testing.inputs.model_hub import ModelHub
from turnwise_testing.inputs.tiny_chat import make_tiny_model, write_gguf
from turnwise_testing.whole_runs.scripted_run import PLUGIN, environment_of, write_scripted_run

NAME: Final = "acme/tiny-chat"


class ServedRunSuite:
    """
    Tests by the command line, in the environment of the engine. A subclass overrides `engine`, the section of a config.

    Attributes:
        plugin: name of the engine's plugin.
        logprob_bound: largest difference to the forward pass in nats, float32 against float32.
    """

    plugin: ClassVar[str]
    logprob_bound: ClassVar[float] = 5e-5

    @classmethod
    def engine(cls) -> Mapping[str, Any]:
        """Return the section `engine` of a config."""
        raise NotImplementedError("override engine")

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of a tiny model of which transformers reads the GGUF form."""
        return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=128)

    def roll_out(
        self, folder: Path, model: str, variables: Mapping[str, str], **sampling: object
    ) -> tuple[list[Trajectory], str]:
        """Roll out two tasks of up to 24 tokens; return their records and the config of the run."""
        write_scripted_run(
            folder,
            num_tasks=2,
            model={"path": model},
            engine=dict(self.engine()),
            plugins=[PLUGIN, self.plugin],
            rollout={"n": 1, "prompt_length": 128, "response_length": 24, "sampling": sampling},
        )
        done = subprocess.run(
            [sys.executable, "-m", "turnwise", "rollout", "run.yaml", "--out", "out"],
            cwd=folder,
            env={**environment_of(folder), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results = read_results(folder / "out")
        assert [each.fault for each in results] == [None, None]
        return [each.trajectories[0] for each in results], (folder / "out/config.resolved.yaml").read_text("utf-8")

    def test_a_model_of_the_hub_with_an_option_of_the_engine(self, model: Path, tmp_path: Path) -> None:
        """The config names the commit, and a penalty lets no token come twice, as the model alone would."""
        with ModelHub() as hub:
            commit = hub.push(NAME, {each.name: each.read_bytes() for each in model.iterdir()})
            penalty = {"temperature": 0.0, "extra": {"presence_penalty": 2.0}}
            records, config = self.roll_out(tmp_path, NAME, hub.environment(tmp_path / "cache"), **penalty)

        assert commit in config
        for record in records:
            ids = record.response_ids.tolist()
            assert len(set(ids)) == len(ids), ids
            greedy = _greedy_ids(model, record.prompt_ids, len(ids))
            assert len(set(greedy)) < len(greedy)

    def test_a_gguf_file(self, model: Path, tmp_path: Path) -> None:
        """Log-probabilities agree with the model of which the file was written, with weights in float32."""
        pytest.importorskip("gguf", reason="the extra `gguf` of turnwise is not installed")
        write_gguf(model, tmp_path / "tiny.gguf", quantized=False)
        variables = ModelHub().environment(tmp_path / "cache", HF_HUB_OFFLINE="1")

        records, _config = self.roll_out(tmp_path, "tiny.gguf", variables)

        for record in records:
            assert np.abs(_forward_logprobs(model, record) - record.logprobs).max() < self.logprob_bound


def _load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype="float32")


def _greedy_ids(model: Path, prompt: Any, number: int) -> list[int]:
    import torch

    made = _load(model).generate(torch.tensor([prompt.tolist()]), max_new_tokens=number, do_sample=False)
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def _forward_logprobs(model: Path, record: Trajectory) -> Any:
    import torch

    ids = torch.tensor([record.input_ids.tolist()])
    policy = _load(model)
    # The file has one token more than the folder, a merge of bytes that no text has, whose embedding is 0.
    policy.resize_token_embeddings(policy.config.vocab_size + 1, mean_resizing=False)
    with torch.no_grad():
        policy.get_input_embeddings().weight[-1] = 0
        scores = policy(ids).logits[0].log_softmax(-1)
    start = record.num_prompt_tokens
    return scores[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()
