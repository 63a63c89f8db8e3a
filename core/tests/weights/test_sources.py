"""Weights from modules, mappings and files say beforehand what they are, and come out as they were put in."""

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from turnwise.errors import EngineError
from turnwise.weight_sources import PreparedSource, as_numpy, as_tensor, source_of
from turnwise.weights import TensorSpec, WeightSource, dtype_of


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(3).bfloat16()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def test_a_module_gives_its_floating_weights_once():
    """Tied weights come under their first name, and counters do not come; bfloat16 keeps its bits."""
    module = Tied()
    source = source_of(module)

    assert isinstance(source, WeightSource)
    assert source.specs == (
        TensorSpec("embed.weight", (4, 3), "float32"),
        TensorSpec("norm.weight", (3,), "bfloat16"),
        TensorSpec("norm.bias", (3,), "bfloat16"),
    )
    arrays = {name: as_numpy(tensor) for name, tensor in source}
    assert arrays["norm.weight"].dtype == np.dtype(ml_dtypes.bfloat16)
    assert arrays["norm.weight"].tolist() == [1.0, 1.0, 1.0]
    np.testing.assert_array_equal(arrays["embed.weight"], module.embed.weight.detach().numpy())


def test_files_are_read_with_and_without_an_index(tmp_path):
    """A folder's files, the files that an index names, or one file: the same weights with their dtypes."""
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2).bfloat16()}
    save_file({"a": weights["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": weights["b"]}, tmp_path / "model-2.safetensors")
    found = source_of(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')

    assert found.specs == (TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (2,), "bfloat16"))
    assert [(name, array.tolist()) for name, array in found] == [("a", [[0, 1, 2], [3, 4, 5]]), ("b", [1, 1])]
    assert [name for name, _ in source_of(str(tmp_path))] == ["a"]
    assert [name for name, _ in source_of(tmp_path / "model-2.safetensors")] == ["b"]


def test_a_folder_without_weights_is_refused(tmp_path):
    """One line says which folder."""
    with pytest.raises(EngineError, match="holds no safetensors file"):
        source_of(tmp_path)


def test_weights_are_cast_renamed_and_joined():
    """Specs and arrays agree after all three."""
    source = source_of({"m.q": np.ones((2, 3), np.float32), "m.k": np.zeros((1, 3), np.float32), "m.o": np.ones(2)})
    prepared = PreparedSource(source=source, dtype="bfloat16", rename={r"^m\.": "x."}, fuse={"x.qk": ["x.q", "x.k"]})

    assert prepared.specs == (TensorSpec("x.qk", (3, 3), "bfloat16"), TensorSpec("x.o", (2,), "bfloat16"))
    assert [(n, a.dtype.name, a.shape) for n, a in prepared] == [
        ("x.qk", "bfloat16", (3, 3)),
        ("x.o", "bfloat16", (2,)),
    ]


def test_a_part_of_a_joined_weight_that_is_missing_is_named():
    """Before anything is sent."""
    prepared = PreparedSource(source=source_of({"q": np.ones((2, 3))}), fuse={"qk": ["q", "k"]})

    with pytest.raises(EngineError, match="cannot join 'qk': there is no weight 'k'"):
        _ = prepared.specs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_numpy_and_torch_agree(dtype):
    """There and back, every floating dtype keeps its numbers."""
    array = np.array([1.5, -2.0, 0.25]).astype(dtype_of(dtype))
    tensor = as_tensor(array, torch)

    assert str(tensor.dtype) == f"torch.{dtype}"
    assert as_numpy(tensor).tolist() == [1.5, -2.0, 0.25]
    assert as_tensor(tensor, torch) is tensor


def test_an_unknown_dtype_is_named():
    """By its name."""
    with pytest.raises(ValueError, match="unknown dtype 'int3' of a weight"):
        dtype_of("int3")
