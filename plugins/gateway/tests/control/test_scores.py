"""Each score counts once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.control.scores import ControlError, ScoreBoard, ScoreReport, Verdict

PLACES = st.sampled_from([{}, {"turn": "t0"}, {"turn": "t1"}, {"record": 0}, {"record": 1}])
REPORTS = st.builds(
    lambda name, score, place: ScoreReport(id=name, score=score, **place),
    st.sampled_from("abc"),
    st.sampled_from([0.0, 0.5, 1.0]),
    PLACES,
)


@given(st.lists(REPORTS, max_size=12), st.integers(0, 12))
def test_reports_in_any_order(reports: list[ScoreReport], num_before_end: int) -> None:
    """The first score of a thing counts, its repetition changes nothing, and every other one is refused."""
    board, accepted = ScoreBoard(), []
    for number, report in enumerate(reports):
        if number == num_before_end:
            board.close()
        same_id = [each for each in accepted if each.id == report.id]
        clashes = [each for each in accepted if each.target == report.target or each.target[0] != report.target[0]]
        if same_id:
            expected = Verdict.REPEATED if same_id == [report] else Verdict.CONFLICT
        elif number >= num_before_end:
            expected = Verdict.LATE
        else:
            expected = Verdict.CONFLICT if clashes else Verdict.ACCEPTED
        assert expected is board.report(report)
        if expected is Verdict.ACCEPTED:
            accepted.append(report)

    found = board.reported(num_records=2)
    if not accepted:
        assert found is None
    elif accepted[0].target[0] == "session":
        assert [found] == [each.score for each in accepted]
    elif accepted[0].target[0] == "turns":
        assert {"turns": {each.turn: each.score for each in accepted}} == found
    else:
        values = [0.0, 0.0]
        for each in accepted:
            values[each.record] = each.score
        assert {"records": values} == found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score": math.nan}, "'score' must be a finite number"),
        ({"score": math.inf}, "'score' must be a finite number"),
        ({"score": True}, "'score' must be a finite number"),
        ({"score": "1"}, "'score' must be a finite number"),
        ({"id": ""}, "'id' must have"),
        ({"turn": "t0", "record": 0}, "not for both"),
        ({"record": 1.0}, "'record' must be"),
        ({"metrics": {"x": None}}, "'metrics.x' must be"),
    ],
)
def test_bad_reports_are_refused(fields: dict[str, object], message: str) -> None:
    """The error names the field."""
    with pytest.raises(ControlError, match=message):
        ScoreReport(**{"id": "a", "score": 1.0, **fields})


def test_metrics_are_summed() -> None:
    """Metrics of all turns add up."""
    board = ScoreBoard()
    board.report(ScoreReport(id="a", score=1.0, turn="t0", metrics={"tests": 2}))
    board.report(ScoreReport(id="b", score=0.0, turn="t1", metrics={"tests": 3, "s": 0.5}))

    assert {"tests": 5.0, "s": 0.5} == board.metrics


def test_a_score_of_nothing_is_an_error() -> None:
    """A session without the record cannot use its score."""
    board = ScoreBoard()
    board.report(ScoreReport(id="a", score=1.0, record=2))

    with pytest.raises(ControlError, match="2 records, and no number 2"):
        board.reported(num_records=2)


@pytest.mark.parametrize("more", [{"score": 3e38}, {"score": 0.0, "metrics": {"tests": -3e38}}])
def test_sums_must_be_numbers_that_can_be_stored(more) -> None:
    """A score or metric that fits alone and not with the earlier ones is refused, and changes nothing."""
    board = ScoreBoard()
    assert board.report(ScoreReport(id="a", score=3e38, turn="t0", metrics={"tests": 3e38})) is Verdict.ACCEPTED

    with pytest.raises(ControlError, match="finite number"):
        board.report(ScoreReport(id="b", turn="t1", **more))

    assert board.reported(num_records=1) == {"turns": {"t0": 3e38}}
    assert board.report(ScoreReport(id="b", turn="t1", score=0.0)) is Verdict.ACCEPTED


@pytest.mark.parametrize(
    "metrics", [{"": 1}, {"x" * 129: 1}, {str(number): 1 for number in range(257)}, {"tests": 10**400}]
)
def test_metrics_have_few_and_short_names(metrics) -> None:
    """Each name becomes a metric of the episode, and a column of its logs."""
    with pytest.raises(ControlError):
        ScoreReport(id="a", score=1.0, metrics=metrics)
