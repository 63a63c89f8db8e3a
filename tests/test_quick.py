"""The marks that conftest.py sets: tests that start a process, and cases that `make test` leaves to the slow tests."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HIDDEN = "import subprocess\n\n\ndef hidden():\n    subprocess.run(['true'])\n"


def run_tests(folder: Path, tests: str, *options: str) -> tuple[dict[str, int], str]:
    """Run tests with the conftest.py of the repository; return the number of each outcome, and the output."""
    (folder / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "tests").mkdir()
    (folder / "tests/test_them.py").write_text(textwrap.dedent(tests), encoding="utf-8")
    (folder / "hidden.py").write_text(HIDDEN, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", *options, "tests"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    last = re.search(r"^\d+ \w+.* in .*$", done.stdout, re.MULTILINE)
    assert last, done.stdout + done.stderr
    return {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", last[0])}, done.stdout


def test_tests_that_start_a_process_are_marked(tmp_path: Path) -> None:
    """The code of a test, of a function or fixture that it uses, or a fixture `starts_a_process`, marks the test."""
    tests = """
        import functools, os, subprocess
        import pytest

        class Record:
            def fork(self): ...

        def helper(): return subprocess.run(["true"])

        @functools.cache
        def once(): return helper()

        @pytest.fixture
        def process(): helper()

        @pytest.fixture
        def sandbox(starts_a_process): ...

        def test_itself(): subprocess.run(["true"])
        def test_helper(): helper()
        def test_cached(): once()
        def test_inner(): return (lambda: helper())()
        def test_fixture(process): ...
        def test_declared(sandbox): ...
        def test_fork(): os.fork and None
        def test_other_fork(): Record().fork()
        def test_nothing(): ...
    """
    outcomes, _ = run_tests(tmp_path, tests, "-m", "not process")

    assert outcomes == {"passed": 2, "deselected": 7}


def test_quick_refuses_a_process(tmp_path: Path) -> None:
    """A process that the code under test starts fails an unmarked test in `make quick`, with the hint."""
    outcomes, output = run_tests(tmp_path, "def test_it():\n    import hidden\n    hidden.hidden()\n", "--quick")

    assert outcomes == {"passed": 1, "error": 1}
    assert "starts a process: let its fixture ask for `starts_a_process`" in output


def test_quick_says_what_it_took(tmp_path: Path) -> None:
    """The report has the number of tests and the processor time, which may not be more than a minute."""
    _, output = run_tests(tmp_path, "def test_it(): ...\n", "--quick")

    assert re.search(r"^quick: 1 tests, \d+ s of processor$", output, re.MULTILINE)


def test_some_of_many_cases_are_quick(tmp_path: Path) -> None:
    """Six cases, or the number of the marker, run in `make test`, and all others in `make test-slow`."""
    tests = """
        import pytest

        @pytest.mark.many_cases
        @pytest.mark.parametrize("x", range(100))
        def test_six(x): ...

        @pytest.mark.many_cases(2)
        @pytest.mark.parametrize("x", range(3))
        def test_two(x): ...

        @pytest.mark.parametrize("x", range(20))
        def test_all(x): ...
    """
    outcomes, _ = run_tests(tmp_path, tests, "-m", "not slow")

    assert outcomes == {"passed": 28, "deselected": 95}


@pytest.mark.slow
def test_a_large_property_is_small_until_the_slow_tests(tmp_path: Path) -> None:
    """`make test` runs five examples of a property that asks for more, and the slow tests all of them."""
    tests = """
        from hypothesis import given, settings, strategies as st

        @settings(max_examples=60)
        @given(st.integers())
        def test_large(x): print("large", file=open("examples", "a"))

        @settings(max_examples=3)
        @given(st.integers())
        def test_small(x): print("small", file=open("examples", "a"))
    """
    numbers = {}
    for name, options in {"fast": (), "slow": ("-m", "not sized", "--hypothesis-profile", "thorough")}.items():
        (tmp_path / name).mkdir()
        run_tests(tmp_path / name, tests, *options)
        numbers[name] = Counter((tmp_path / name / "examples").read_text(encoding="utf-8").split())

    assert numbers == {"fast": {"large": 5, "small": 3}, "slow": {"large": 60}}
