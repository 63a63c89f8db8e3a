"""Weights in files, as the processes of an engine map them."""

import numpy as np
import torch

from turnwise.protocols.weights import StoredWeight, TensorSpec
from turnwise_engine_support.stored_weights import map_weights, place_of


def test_weights_are_mapped_from_their_files(tmp_path):
    """Every dtype and shape, a weight without bytes, and several files; a tensor outlives the next one."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(np.arange(6, dtype=np.float32).tobytes().ljust(64, b"x") + np.array([2.5]).tobytes())
    second.write_bytes(torch.tensor([1.5, -3.0], dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
    stored = [
        StoredWeight(TensorSpec("matrix", (2, 3), "float32"), str(first), 0),
        StoredWeight(TensorSpec("scalar", (), "float64"), str(first), 64),
        StoredWeight(TensorSpec("empty", (0, 4), "float32"), str(first), 64),
        StoredWeight(TensorSpec("half", (2,), "bfloat16"), str(second), 0),
    ]

    found = dict(map_weights(map(place_of, stored)))

    assert [(each.spec.name, each.spec.shape, f"torch.{each.spec.dtype}") for each in stored] == [
        (name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in found.items()
    ]
    assert [[[0, 1, 2], [3, 4, 5]], 2.5, [], [1.5, -3.0]] == [tensor.tolist() for tensor in found.values()]


def test_a_mapped_weight_that_is_written_changes_no_file(tmp_path):
    """Other processes map the same file."""
    path = tmp_path / "weights"
    path.write_bytes(np.ones(4, np.float32).tobytes())
    place = place_of(StoredWeight(TensorSpec("w", (4,), "float32"), str(path), 0))

    ((_name, tensor),) = map_weights([place])
    tensor += 1
    ((_name, other),) = map_weights([place])

    assert [[2.0] * 4, [1.0] * 4] == [tensor.tolist(), other.tolist()]
