"""Pages of weights that a file has leave memory, and nothing that was written is lost."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from turnwise_engine_support.freed_memory import release_file_pages
from turnwise_testing.probes.mapped_files import resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages were written")

ARRAYS = {name: np.full((1 << 17,), number, np.float32) for number, name in enumerate("abc")}
"""Three weights of 128 pages each."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of safetensors."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(ARRAYS, path)
    return path


def map_file(path):
    """Return the weights of a file by name, in one mapping, after all pages were read."""
    with safe_open(path, framework="pt") as stored:
        weights = {name: stored.get_tensor(name) for name in ARRAYS}
    assert all(weights[name].sum() == array.sum() for name, array in ARRAYS.items())
    return weights


@settings(max_examples=20, deadline=None)
@given(written=st.sets(st.tuples(st.sampled_from("abc"), st.integers(0, (1 << 17) - 1)), max_size=3))
def test_written_pages_stay(file, written):
    """A mapping leaves memory if nothing wrote to it, and keeps every value in any case."""
    weights, other = map_file(file), map_file(file)
    for name, place in written:
        weights[name][place] = -1
    before = resident_bytes(file)

    released = release_file_pages(weights.values())

    size = sum(array.nbytes for array in ARRAYS.values())
    assert (released >= size) == (not written)
    assert before - resident_bytes(file) >= (0 if written else size)
    for name, array in ARRAYS.items():
        expected = array.copy()
        for _, place in (each for each in written if each[0] == name):
            expected[place] = -1
        assert np.array_equal(expected, weights[name].numpy())
        assert np.array_equal(array, other[name].numpy())


def test_other_memory_is_left_alone(file):
    """A weight in memory of the process is none of a file; the mapping of another weight stays."""
    other = map_file(file)
    before = resident_bytes(file)

    assert 0 == release_file_pages([torch.ones(1 << 17), torch.empty(0), torch.ones(3, device="meta")])

    assert before == resident_bytes(file) > 0
    assert other["a"].sum() == ARRAYS["a"].sum()
