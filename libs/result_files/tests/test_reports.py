"""Reports are in the files of episodes as they are, whatever their texts hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, Report, Status, Task
from turnwise.errors import DataError
from turnwise_result_files import TrajectoryWriter, read_results

TEXTS = st.text(max_size=20)
FACTS = st.dictionaries(
    TEXTS, TEXTS | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False), max_size=3
)
REPORTS = st.builds(Report, title=TEXTS, text=TEXTS, facts=FACTS, failed=st.booleans(), num_turns=st.integers(0, 9))


@given(reports=st.lists(REPORTS, max_size=3), suffix=st.sampled_from([".parquet", ".jsonl"]))
def test_a_file_has_the_reports(tmp_path_factory, reports, suffix):
    """Both forms of files."""
    result = EpisodeResult(task=Task(messages=(), uid="u"), status=Status.COMPLETED, reports=tuple(reports))
    file = tmp_path_factory.mktemp("reports") / f"trajectories{suffix}"

    with TrajectoryWriter(file) as writer:
        writer.write(result)

    (read,) = read_results(file)
    assert tuple(reports) == read.reports


def test_odd_values_are_texts(tmp_path):
    """Half a surrogate pair is escaped, and a fact of another kind is its text."""
    report = Report(title="\ud800", facts={"path": tmp_path, "bad": float("nan")})
    result = EpisodeResult(task=Task(messages=(), uid="u"), status=Status.COMPLETED, reports=(report,))
    file = tmp_path / "trajectories.parquet"

    with TrajectoryWriter(file) as writer:
        writer.write(result)

    ((read,),) = (each.reports for each in read_results(file))
    assert (read.title, read.facts["path"]) == ("\\ud800", str(tmp_path))


def test_damaged_facts_are_refused(tmp_path):
    """The error names the column."""
    result = EpisodeResult(
        task=Task(messages=(), uid="u"), status=Status.COMPLETED, reports=(Report(title="t", facts={"a": 1}),)
    )
    file = tmp_path / "trajectories.jsonl"
    with TrajectoryWriter(file) as writer:
        writer.write(result)
    file.write_text(file.read_text().replace('{\\"a\\": 1}', "[]"))

    with pytest.raises(DataError, match=r"'reports.facts' is not an object"):
        list(read_results(file))
