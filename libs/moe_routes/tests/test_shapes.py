"""The column, and routes that a server returns."""

import json

import numpy as np
import pytest

from turnwise.errors import EngineError
from turnwise_moe_routes.shapes import RouteShape, find_shape, read_shape


def test_shape_of_a_config(tmp_path):
    """The names of several families, also of a model with a vision tower; no experts, no shape."""
    qwen = {"num_hidden_layers": 48, "num_experts_per_tok": 8, "num_experts": 128}
    assert find_shape(qwen) == RouteShape(48, 8, 128)
    assert find_shape({"text_config": qwen, "num_hidden_layers": 3}) == RouteShape(48, 8, 128)
    assert find_shape({"num_hidden_layers": 61, "num_experts_per_tok": 8, "n_routed_experts": 256}).num_experts == 256
    assert find_shape({"num_hidden_layers": 28}) is None
    assert read_shape(None) is None
    assert read_shape(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(qwen), encoding="utf-8")
    assert read_shape(tmp_path).column.shape == (48, 8)
    assert read_shape(tmp_path).column.tokens == "all"


def test_routes_of_a_server():
    """The last token, which no server has run, has none; other shapes and experts are refused."""
    shape = RouteShape(2, 1, 4)
    found = shape.pad(np.array([[[0], [3]], [[1], [2]]]), 3, "the server")
    assert found.dtype == np.int16
    assert found[:, :, 0].tolist() == [[0, 3], [1, 2], [-1, -1]]
    with pytest.raises(EngineError, match=r"^the server returned routed experts of shape \(2, 1, 1\) for 3 tokens"):
        shape.pad(np.zeros((2, 1, 1)), 3, "the server")
    with pytest.raises(EngineError, match="for 1 tokens; expected at most 1 times"):
        shape.pad(np.zeros((2, 2, 1)), 1, "the server")
    with pytest.raises(EngineError, match="the server returned the expert 4 of 4"):
        shape.pad(np.full((1, 2, 1), 4), 3, "the server")
