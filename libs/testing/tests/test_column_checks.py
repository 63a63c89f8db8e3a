"""The checks of columns accept declarations of every kind, and refuse wrong ones."""

import numpy as np
import pytest
from hypothesis import strategies as st

from turnwise import ColumnSpec, Trajectory
from turnwise.errors import PluginError, TrajectoryError
from turnwise.record.column_specs import TYPES
from turnwise_testing.checks.column import COLUMN_CHECKS, ColumnProbe

GOOD = [
    ColumnSpec(name="routes", dtype="int16", shape=(2, 3), fill=-1, tokens="all"),
    ColumnSpec(name="top_k", dtype="float32", shape=(2,), fill=float("nan"), on_branch="fill"),
    ColumnSpec(name="teacher", dtype="float16", tokens="none"),
    *(ColumnSpec(name="plain", dtype=dtype, fill=1) for dtype in TYPES),
]


@pytest.mark.many_cases(4)
@pytest.mark.parametrize("spec", GOOD, ids=lambda spec: f"{spec.name}-{spec.dtype}")
def test_good_columns_pass(spec):
    """Each check passes, with the values of any numbers and with those of an author."""
    for check in COLUMN_CHECKS.values():
        check(ColumnProbe(make_column=lambda: spec, max_examples=3))
        check(ColumnProbe(make_column=lambda: spec, max_examples=2, numbers=st.just(0)))


def failures(**changes) -> set[str]:
    """Return the names of the checks that fail."""
    failed = set()
    for name, check in COLUMN_CHECKS.items():
        try:
            check(ColumnProbe(**{"make_column": lambda: GOOD[0], "max_examples": 10} | changes))
        except (AssertionError, TrajectoryError):
            failed.add(name)
    return failed


def test_a_taken_name_is_refused():
    """A name that every record has."""
    taken = ColumnSpec(name="logprobs", dtype="float32")
    with pytest.raises(PluginError, match="every record or batch has something of that name"):
        COLUMN_CHECKS["is_a_declaration"](ColumnProbe(make_column=lambda: taken))


def test_declarations_that_differ_are_refused():
    """A factory that counts makes records that do not go together."""
    numbers = iter(range(1, 10_000))
    assert "is_a_declaration" in failures(
        make_column=lambda: ColumnSpec(name="counted", dtype="int32", version=next(numbers))
    )


def break_cut(monkeypatch):
    whole = Trajectory._copied
    monkeypatch.setattr(
        Trajectory,
        "_copied",
        lambda self, size: whole(self, size) | {n: whole(self, size)[n] * 0 for n in self.columns},
    )


@pytest.mark.slow
def test_a_fault_of_a_record_is_found(monkeypatch):
    """The checks of a cut and a branch fail when a record loses values."""
    break_cut(monkeypatch)
    assert {"truncation", "branch"} <= failures(numbers=st.integers(1, 9))


@pytest.mark.slow
def test_a_fault_of_files_is_found(monkeypatch):
    """The check of files fails when values are written in another order."""
    from turnwise_result_files import episode_rows

    own = episode_rows.encode
    monkeypatch.setattr(episode_rows, "encode", lambda values: own(np.flip(values)))
    assert {"file"} == failures()
