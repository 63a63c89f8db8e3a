"""Full garbage collections wait until the process has grown."""

import gc
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.collector import full_collections_on_growth, read_memory

pytestmark = pytest.mark.own_process
STANDARD = (700, 10, 10)


@contextmanager
def counted():
    """The generation of each collection that ends in here."""
    generations = []

    def note(phase, info):
        if phase == "stop":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield generations
    finally:
        gc.callbacks.remove(note)


@pytest.fixture(autouse=True)
def standard():
    """Python's own thresholds, and few objects that a collection visits."""
    gc.set_threshold(*STANDARD)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def open_sessions():
    """Make objects that live on, as those of sessions do: enough for several full collections by Python's rule."""
    return [[] for _ in range(200_000)]


def test_python_collects_when_objects_live_on():
    """By its own rule there are full collections, so the next tests can fail."""
    with counted() as generations:
        kept = open_sessions()
    assert 2 in generations
    assert len(kept) == 200_000


def test_objects_that_live_on_cause_no_full_collection():
    """As long as the process does not grow."""
    with full_collections_on_growth(lambda: 1000), counted() as generations:
        kept = open_sessions()
    assert 2 not in generations
    assert 1 in generations
    assert len(kept) == 200_000


def test_growth_causes_one():
    """A full collection comes when a quarter has been added, and the next one when a quarter has been added to that."""
    memory = 1000
    with full_collections_on_growth(lambda: memory):
        for memory, is_due in [(1000, False), (1250, False), (1251, True), (1400, False), (1563, False), (1564, True)]:
            with counted() as generations:
                kept = open_sessions()
            assert (2 in generations) == is_due, memory
            del kept


@given(first=st.integers(1, 10_000), steps=st.lists(st.tuples(st.integers(1, 10_000), st.booleans()), max_size=20))
def test_growth_brings_the_rule_back_until_a_full_collection(first, steps):
    """Python's rule holds from a growth by more than a quarter until a full collection, also if memory falls."""
    memory = last = first
    has_grown = False
    with full_collections_on_growth(lambda: memory):
        for memory, is_full in steps:
            gc.collect(2 if is_full else 1)
            has_grown = not is_full and (has_grown or memory > 1.25 * last)
            last = memory if is_full else last
            assert (gc.get_threshold() == STANDARD) == has_grown


def test_a_call_collects_at_once():
    """`gc.collect()` frees circles as ever."""

    class Circle:
        def __init__(self):
            self.me = self

        def __del__(self):
            freed.append(1)

    freed = []
    with full_collections_on_growth(lambda: 1000):
        Circle()
        gc.collect()
    assert freed == [1]


@pytest.mark.parametrize("first", [0, 1])
def test_the_end_brings_the_rule_back(first):
    """Also if several runs of a process overlap, in whatever order they end, and if the body fails."""
    runs = [full_collections_on_growth(), full_collections_on_growth()]
    num_callbacks = len(gc.callbacks)
    for run in runs:
        run.__enter__()
    assert gc.get_threshold()[2] > 1_000_000
    runs[first].__exit__(None, None, None)
    runs[1 - first].__exit__(None, None, None)
    with pytest.raises(KeyError), full_collections_on_growth():
        raise KeyError
    assert (gc.get_threshold(), len(gc.callbacks)) == (STANDARD, num_callbacks)


def test_memory_is_that_of_this_process():
    """It grows with a block, and a new program does not begin with its parent's."""
    code = "from turnwise.collector import read_memory; print(read_memory())"
    run = partial(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, child = read_memory(), int(run().stdout)
    block = bytearray(b"1") * (1 << 28)
    assert read_memory() > before + child
    assert int(run().stdout) < 2 * child
    assert len(block) == 1 << 28
