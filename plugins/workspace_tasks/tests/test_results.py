"""Results of tests are read, and damaged ones are refused."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_workspace_tasks.graded_task import RESULT_FORMS
from turnwise_workspace_tasks.results import ResultError, Results, read_result

JUNIT = b"""<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="t.A" name="good"/><testcase name="bad"><failure/></testcase>
<testcase classname="t.A" name="twice"/><testcase classname="t.A" name="twice"><error/></testcase>
<testcase name="later"><skipped/></testcase></testsuite></testsuites>"""
CTRF = {"results": {"tests": [{"name": "a", "status": "passed"}, {"name": "b", "status": "other"}]}}


def test_reports_by_test():
    """Skipped tests do not count, and of two with one name both must pass."""
    assert read_result("junit", "j.xml", JUNIT).passed == {"t.A.good": True, "bad": False, "t.A.twice": False}
    assert read_result("ctrf", "c.json", json.dumps(CTRF).encode()).passed == {"a": True, "b": False}


def test_lines_of_a_summary():
    """Parameters of a name may hold spaces; the reason of a failure does not belong to it."""
    text = (
        b"PASSED t.py::a[x y]\nFAILED t.py::b - assert 1 == 2\nXFAIL t.py::c\nnot PASSED t.py::d\nSKIPPED [1] t.py:3\n"
    )

    passed = read_result("pytest", "the output", text).passed

    assert passed == {"t.py::a[x y]": True, "t.py::b": False, "t.py::c": True}


HEADER = "=========================== short test summary info ============================\n"


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("PASSED t.py::a\r\nFAILED t.py::b - x\r\n", {"t.py::a": True, "t.py::b": False}),
        ("\x1b[32mPASSED\x1b[0m t.py::\x1b[1ma\x1b[0m\n", {"t.py::a": True}),
        ("PASSED a b/t.py::c\nFAILED a b/t.py::d - e\n", {"a b/t.py::c": True, "a b/t.py::d": False}),
        ("PASSED t.py::a[x - y]\nPASSED t.py::a[b[c]]\n", {"t.py::a[x - y]": True, "t.py::a[b[c]]": True}),
        ("FAILED t.py::a[x - y] - AssertionError: [z]\n", {"t.py::a[x - y]": False}),
        ("FAILED t.py::a - assert [1] == [2]\n", {"t.py::a": False}),
        ("PASSED t.py::a\nSUBFAILED[one x] (i=1) t.py::a - b\n", {"t.py::a": False}),
        ("PASSED t.py::a\nSUBFAIL t.py::a - b\n", {"t.py::a": False}),
        ("XFAIL t.py::a - later\nXPASS t.py::b - oh\n", {"t.py::a": True, "t.py::b": False}),
        ("PASSED t.py::a\nERROR t.py::a - at the end\n", {"t.py::a": False}),
        ("ERROR t.py - ModuleNotFoundError: No module named 'x'\n", {"t.py": False}),
    ],
)
@pytest.mark.parametrize("header", ["", HEADER])
def test_lines_of_pytest(header, text, passed):
    """Colours, line ends, names with spaces and brackets, subtests, and errors of a file or after a test."""
    assert read_result("pytest", "the output", (header + text).encode()).passed == passed


@pytest.mark.parametrize(
    ("before", "passed"),
    [
        ("PASSED t.py::b\nPASSED t.py::more\n", {"t.py::a": True}),
        (f"{HEADER}PASSED t.py::b\n", {"t.py::a": True}),
        ("ERROR the input is bad\nERROR    root:x.py:3 no\nFAILED to open\n", {"t.py::a": True}),
        (f"{HEADER}FAILED t.py::a - of a first command\n", {"t.py::a": False}),
        (f"{HEADER}FAILED t.py::c - of a first command\n", {"t.py::a": True, "t.py::c": False}),
    ],
)
def test_lines_before_the_summary(before, passed):
    """A program under test may print whatever it likes: no test passes by it, and its errors are none of pytest's."""
    assert read_result("pytest", "the output", f"{before}{HEADER}PASSED t.py::a\n".encode()).passed == passed


@pytest.mark.parametrize("piece", ["] (", "=", " - ", "[", "]", "PASSED ", "SUBFAILED[", "\x1b["])
@pytest.mark.parametrize("start", ["SUBFAILED[", "FAILED a", "PASSED a", "XFAIL a", "="])
def test_long_lines_take_no_time(start, piece):
    """A program under test may print lines of megabytes; time that grows with their square would end this in hours."""
    with suppress(ResultError):
        read_result("pytest", "the output", f"{start}{piece * (2**21 // len(piece))}\n".encode())


def test_a_test_that_is_skipped_and_fails_has_failed():
    """As pytest reports a fixture that fails after a test was skipped."""
    found = read_result("junit", "j.xml", b"<a><testcase name='b'><skipped/><error/></testcase></a>")

    assert found.passed == {"b": False}


@pytest.mark.parametrize("depth", [1, 1000, 100_000])
def test_nested_suites(depth):
    """However deep they are."""
    data = b"<testsuite>" * depth + b"<testcase name='a'/>" + b"</testsuite>" * depth

    assert read_result("junit", "j.xml", data).passed == {"a": True}


def test_numbers():
    """A reward file has one number, or the one that is named so."""
    assert read_result("reward", "reward.txt", b" 0.5\n").value == 0.5
    assert read_result("reward", "reward.json", b'{"reward": 1, "speed": 3.5}').value == 1.0
    assert read_result("reward", "reward.json", b'{"accuracy": 0.25}').value == 0.25


@pytest.mark.parametrize(
    ("form", "name", "data"),
    [
        ("reward", "reward.txt", b""),
        ("reward", "reward.txt", b"nan"),
        ("reward", "reward.txt", b"\xff1"),
        ("reward", "reward.json", b'{"a": 1, "b": 2}'),
        ("reward", "reward.json", b"[1]"),
        ("reward", "reward.json", json.dumps({f"n{n}": n for n in range(40)}).encode()),
        ("reward", "reward.json", b"[" * 100_000),
        ("reward", "reward.json", b'{"reward": ' + b"9" * 400 + b"}"),
        ("reward", "reward.json", b'{"reward": 1e999}'),
        ("reward", "reward.txt", b"9" * 400),
        ("reward", "reward.txt", b"1\n0\n"),
        ("pytest", "the output", b"3 passed"),
        ("ctrf", "c.json", b'{"results": {}}'),
        ("junit", "j.xml", b"<testsuite>"),
        ("junit", "j.xml", b""),
        ("junit", "j.xml", b"<?xml version='1.0' encoding='nonsense'?><testsuite/>"),
        ("junit", "j.xml", b"<?xml version='1.0' encoding='cp037'?><testsuite/>"),
        ("junit", "j.xml", b'<!DOCTYPE a [<!ENTITY b "cc">]><testsuite><testcase name="&b;"/></testsuite>'),
    ],
)
def test_damaged_results_are_refused(form, name, data):
    """They are no reward, whatever is in them."""
    with pytest.raises(ResultError, match=name):
        read_result(form, name, data)


@given(st.sampled_from(RESULT_FORMS), st.sampled_from(["r.txt", "r.json"]), st.binary() | st.text().map(str.encode))
def test_any_bytes_are_results_or_refused(form, name, data):
    """The agent's code may have written them."""
    with suppress(ResultError):
        assert isinstance(read_result(form, name, data), Results)


def test_scores():
    """Named tests decide alone, and one that did not run has failed; no test at all is no success."""
    results = Results(passed={"a": True, "b": False, "c": True})

    assert results.score((), fraction=False) == 0.0
    assert results.score((), fraction=True) == pytest.approx(2 / 3)
    assert results.score(("a", "c"), fraction=False) == 1.0
    assert results.score(("a", "gone"), fraction=True) == 0.5
    assert Results().score((), fraction=True) == 0.0
