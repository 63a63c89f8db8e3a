"""New weights before they reach vLLM: what is refused, and that the numbers arrive as they were."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from turnwise.errors import EngineError
from turnwise_vllm_engine.weights import Expected, checkpoint_shapes, stage

SHAPES = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.layers.0.mlp.experts.0.up_proj.weight": (4, 4),
    "model.layers.0.mlp.experts.1.up_proj.weight": (4, 4),
    "model.norm.weight": (4,),
}
EXPECTED = Expected(SHAPES, fused=[["q_proj", "k_proj", "v_proj"]], tied=True)
ALL = {name: np.full(shape, i, np.float32) for i, (name, shape) in enumerate(SHAPES.items())}


@pytest.fixture
def put(tmp_path):
    """A function that stages weights in a folder of the test."""

    def run(weights, expected=EXPECTED, bucket_bytes=1 << 20, whole=False):
        return stage(weights, expected, weight_dir=tmp_path, bucket_bytes=bucket_bytes, whole=whole)

    return run


def read(staged):
    return {name: array for path in staged.paths for name, array in load_file(path).items()}


@pytest.mark.parametrize("bucket_bytes", [1, 64, 100, 1 << 20])
def test_all_numbers_arrive(put, bucket_bytes):
    """Whatever the size of a bucket, in as many files as it takes, and nothing is left of them afterwards."""
    staged = put(ALL.items(), bucket_bytes=bucket_bytes)

    found = read(staged)
    assert set(ALL) == set(found) == staged.names
    assert all(np.array_equal(ALL[name], found[name]) for name in ALL)
    assert sum(each.nbytes for each in ALL.values()) == staged.num_bytes
    assert (len(ALL) if bucket_bytes == 1 else 1) == len(staged.paths) or bucket_bytes in (64, 100)
    staged.remove()
    assert not staged.folder.exists()


def test_views_are_copied(put):
    """A transport may hand out one buffer again and again."""
    buffer = np.zeros(4, np.float32)

    def weights():
        for name, value in (("model.norm.weight", 1.0), ("model.other.weight", 2.0)):
            buffer[:] = value
            yield name, buffer

    found = read(put(weights(), Expected({})))

    expected = {"model.norm.weight": [1.0] * 4, "model.other.weight": [2.0] * 4}
    assert expected == {name: array.tolist() for name, array in found.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_layout_and_dtype_do_not_matter(put, dtype):
    """A transposed view of any floating point type arrives with its shape and numbers."""
    array = np.arange(8, dtype=dtype).reshape(4, 2).T

    (found,) = read(put([("w", array)], Expected({}))).values()

    assert (dtype, array.tolist()) == (found.dtype.name, found.tolist())


def test_bfloat16_arrives_bit_by_bit(put):
    """From ml_dtypes, which is how numpy has it."""
    array = np.array([1.5, -3.0, 1e-8], ml_dtypes.bfloat16)

    staged = put([("w", array)], Expected({}))

    raw = staged.paths[0].read_bytes()
    size = int.from_bytes(raw[:8], "little")
    assert {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]} == json.loads(raw[8 : 8 + size])["w"]
    assert array.tobytes() == raw[8 + size :]


def test_torch_tensors_arrive(put):
    """Also those that need gradients, and bfloat16, which numpy has not."""
    torch = pytest.importorskip("torch")
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3).T.requires_grad_(),
        "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    }

    staged = put(tensors.items(), Expected({}))

    from safetensors.torch import load_file as load_torch

    found = load_torch(staged.paths[0])
    assert all(torch.equal(tensors[name].detach(), found[name]) for name in tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.nrom.weight": np.zeros(4, np.float32)}, "no weight 'model.nrom.weight'; did you mean 'model.norm.wei"),
        ({"model.norm.weight": np.zeros(5, np.float32)}, r"weight 'model.norm.weight' has shape \(4,\), got \(5,\)"),
        ({"model.norm.weight": np.zeros(4, np.int8)}, "must be of floating point, got int8"),
        ({"lm_head.weight": np.zeros((4, 8), np.float32)}, r"has shape \(8, 4\), got \(4, 8\)"),
    ],
)
def test_what_the_model_has_not_is_refused(put, tmp_path, change, message):
    """One bad weight refuses all of them, and leaves no file behind."""
    with pytest.raises(EngineError, match=message):
        put((ALL | change).items())

    assert [] == list(tmp_path.iterdir())


def test_a_weight_that_comes_twice_is_refused(put):
    """Which of the two is meant is nobody's to guess."""
    with pytest.raises(EngineError, match=r"weight 'model.norm.weight' came twice"):
        put([*ALL.items(), ("model.norm.weight", ALL["model.norm.weight"])])


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["model.layers.0.self_attn.q_proj.weight"], "2 weights are missing, such as .*k_proj.*: vLLM makes one layer"),
        (["model.layers.0.mlp.experts.1.up_proj.weight"], "1 weights are missing, such as .*experts.0.up_proj.weight"),
    ],
)
def test_parts_of_a_fused_layer_come_together(put, names, missing):
    """vLLM would fill the rest of the layer with whatever is in memory."""
    with pytest.raises(EngineError, match=missing):
        put([(name, ALL[name]) for name in names])


def test_some_layers_are_fine(put):
    """Whole layers, and layers that vLLM does not fuse."""
    names = [name for name in ALL if "self_attn" in name or "norm" in name]

    assert set(names) == put([(name, ALL[name]) for name in names]).names


def test_all_are_needed_when_the_model_holds_none(put):
    """After the weights were dropped there is nothing to keep."""
    with pytest.raises(EngineError, match=r"1 weights are missing, such as 'model.norm.weight': the model holds none"):
        put([(name, array) for name, array in ALL.items() if "norm" not in name], whole=True)
    assert set(ALL) == put(ALL.items(), whole=True).names


def test_a_tied_output_layer_is_not_sent(put):
    """A trainer's state dict has it twice; vLLM and the model's files have it once."""
    table = ALL["model.embed_tokens.weight"]

    assert "lm_head.weight" not in put({**ALL, "lm_head.weight": table}.items()).names


def test_a_source_that_breaks_off_leaves_nothing(put, tmp_path):
    """Its error is told, and the files are gone."""

    def weights():
        yield from list(ALL.items())[:2]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(EngineError, match="the new weights broke off: ConnectionError: the trainer is gone"):
        put(weights(), bucket_bytes=1)
    assert [] == list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_says_so():
    """One line that names it."""
    from pathlib import Path

    with pytest.raises(EngineError, match="cannot write new weights to '/no/such/folder'"):
        stage(ALL.items(), EXPECTED, weight_dir=Path("/no/such/folder"), bucket_bytes=1, whole=False)


def test_names_and_shapes_are_read_from_the_headers(tmp_path):
    """Of all files of a model, without their numbers."""
    parts = list(ALL.items())
    save_file(dict(parts[:3]), tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file(dict(parts[3:]), tmp_path / "model-2.safetensors")

    assert SHAPES == checkpoint_shapes(tmp_path)
