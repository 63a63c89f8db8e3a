"""Runs in a random order: a seed repeats the order, and a run that fails lists its tests."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
FILES = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, int, str])), max_size=30)


def find_conftest(request: pytest.FixtureRequest) -> Any:
    """Return the root's conftest."""
    [conftest] = [each for each in request.config.pluginmanager.get_plugins() if hasattr(each, "shuffled")]
    return conftest


@given(st.sets(st.text()), st.integers(1, 5))
def test_the_parts_of_the_tests_are_all_of_them(request, names, count) -> None:
    """Each test is in one part, in the order of all, and in the same one when others are added."""
    choose_part = find_conftest(request).choose_part
    items = [SimpleNamespace(nodeid=name, get_closest_marker=lambda _name: None) for name in sorted(names)]

    parts = [choose_part(items, number, count) for number in range(1, count + 1)]

    assert [each.nodeid for each in items] == sorted(each.nodeid for chosen, _ in parts for each in chosen)
    for number, (chosen, left) in enumerate(parts, 1):
        assert chosen == [each for each in items if each in chosen]
        assert [each.nodeid for each in items if each not in chosen] == [each.nodeid for each in left]
        assert (chosen, []) == choose_part(chosen, number, count)


def test_tests_that_share_a_start_are_in_one_part(request) -> None:
    """All tests of a file with the marker `one_part` are in the same part."""
    names = [f"tests/test_{file}.py::test_{number}" for file in "abcdef" for number in range(9)]
    items = [SimpleNamespace(nodeid=name, get_closest_marker={"one_part": True}.get) for name in names]

    parts = [find_conftest(request).choose_part(items, number, 3)[0] for number in (1, 2, 3)]

    files = [{each.nodeid.partition("::")[0] for each in part} for part in parts]
    assert sum(map(len, parts)) == len(items)
    assert sum(map(len, files)) == 6
    assert min(map(len, files)) >= 1


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "/", "1/0", "-1/3"])
def test_a_part_that_is_none_is_an_error(request, text) -> None:
    """A misspelt part does not run all tests, or none."""
    with pytest.raises(ArgumentTypeError, match="expected K/N"):
        find_conftest(request).read_part(text)


@given(FILES, st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_an_order_depends_on_the_seed_alone(request, places, seed, choices: random.Random) -> None:
    """Every test runs once, tests of a file and of a class stay together, and the earlier order has no influence."""
    shuffled = find_conftest(request).shuffled
    items = [SimpleNamespace(path=path, cls=kind, nodeid=f"{n}") for n, (path, kind) in enumerate(places)]
    other = choices.sample(items, len(items))

    order = shuffled(items, seed)

    assert [each.nodeid for each in order] == [each.nodeid for each in shuffled(other, seed)]
    assert sorted(each.nodeid for each in items) == sorted(each.nodeid for each in order)
    for key in (lambda each: each.path, lambda each: (each.path, each.cls)):
        keys = [key(each) for each in order]
        assert len(set(keys)) == len([k for n, k in enumerate(keys) if n == 0 or keys[n - 1] != k])


@pytest.mark.own_process
def test_a_marked_test_has_its_own_process() -> None:
    """A marked test runs in a process without other tests, so nothing else changes its measurements."""
    assert "TURNWISE_TEST_OWN_PROCESS" in os.environ


@pytest.mark.slow
def test_a_failed_test_is_listed_with_its_seed(tmp_path: Path) -> None:
    """The script runs the tests as often as it is told, and its exit code says whether one failed."""
    file = ROOT / "tests/repeat.py"
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--shuffle')\n")
    (tmp_path / "test_some.py").write_text("def test_good(): pass\n\n\ndef test_bad(): assert False\n")

    done = subprocess.run(
        [sys.executable, file, "2", "--seed", "1", "--workers", "0", "--cores", "1", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )

    assert 1 == done.returncode, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    seeds = [random.Random(1).randrange(10**6)]
    assert f"run 1 of 2: --shuffle {seeds[0]}, " in lines[0]
    assert lines[0].endswith("1 passed, 1 failed, exit 1")
    assert lines[1].startswith(f"    --shuffle {seeds[0]}: ")
    assert lines[1].endswith("test_some::test_bad")
    assert "0 of 2 runs are green" == lines[4]
    assert lines[5].startswith("    failed in 2 of 2: ")
