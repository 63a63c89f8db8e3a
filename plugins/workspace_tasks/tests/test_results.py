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
        ("pytest", "the output", b"3 passed"),
        ("ctrf", "c.json", b'{"results": {}}'),
        ("junit", "j.xml", b"<testsuite>"),
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
