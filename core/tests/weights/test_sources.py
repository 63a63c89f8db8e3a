"""Sources of modules, mappings and files know names, shapes and dtypes in advance, and yield the same weights."""

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from turnwise.errors import EngineError
from turnwise.protocols.weights import TensorSpec, WeightSource, dtype_of
from turnwise.weights.sources import ConvertedSource, as_numpy, as_tensor, source_of


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(3).bfloat16()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def test_a_module_yields_its_floating_weights_once():
    """Tied weights appear under their first name, integer buffers are left out, and bfloat16 keeps its bits."""
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
    """All files of a folder, the files that an index names, or one file: names, shapes, dtypes and values are kept."""
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
    """The error names the folder."""
    with pytest.raises(EngineError, match=f"'{tmp_path}' contains no safetensors file"):
        source_of(tmp_path)


def test_weights_are_cast_renamed_and_fused():
    """The specs describe the converted arrays."""
    source = source_of({"m.q": np.ones((2, 3), np.float32), "m.k": np.zeros((1, 3), np.float32), "m.o": np.ones(2)})
    prepared = ConvertedSource(source=source, dtype="bfloat16", rename={r"^m\.": "x."}, fuse={"x.qk": ["x.q", "x.k"]})

    assert prepared.specs == (TensorSpec("x.qk", (3, 3), "bfloat16"), TensorSpec("x.o", (2,), "bfloat16"))
    assert [(n, a.dtype.name, a.shape) for n, a in prepared] == [
        ("x.qk", "bfloat16", (3, 3)),
        ("x.o", "bfloat16", (2,)),
    ]


def test_a_missing_part_of_a_fused_weight_is_named():
    """The specs already raise the error, before any weight is sent."""
    prepared = ConvertedSource(source=source_of({"q": np.ones((2, 3))}), fuse={"qk": ["q", "k"]})

    with pytest.raises(EngineError, match=r"weights\.fuse: cannot build 'qk': there is no weight 'k'"):
        _ = prepared.specs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_numpy_and_torch_agree(dtype):
    """Every floating dtype keeps its values from numpy to torch and back."""
    array = np.array([1.5, -2.0, 0.25]).astype(dtype_of(dtype))
    tensor = as_tensor(array, torch)

    assert str(tensor.dtype) == f"torch.{dtype}"
    assert as_numpy(tensor).tolist() == [1.5, -2.0, 0.25]
    assert as_tensor(tensor, torch) is tensor


@pytest.mark.parametrize("weight", [np.ones(3), torch.ones(3), torch.ones(3).bfloat16()])
def test_a_host_copy_shares_no_memory(weight):
    """A later change of the original does not reach the copy."""
    copy = as_numpy(weight, copy=True)
    weight += 1

    assert [1.0] * 3 == copy.tolist()


def test_an_unknown_dtype_is_named():
    """The error contains the name of the dtype."""
    with pytest.raises(ValueError, match="unknown dtype 'int3' of a weight"):
        dtype_of("int3")
