"""Tests of `turnwise_commands.display`."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from turnwise.record.columns import Origin
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.terminal import literal
from turnwise.types import EpisodeMetrics, Fault, Status, Task, TrajectoryScore
from turnwise_commands.display import MARKERS, results_table, summary_table, trajectory_view
from turnwise_result_files import summarize
from turnwise_testing.inputs.strategies import trajectories

WORDS = ["<user>", "think", "4", "obs", "forced", "left path", "right path", "done"]
few = settings(max_examples=30, deadline=None)


def decode(ids) -> str:
    return " ".join(WORDS[i] for i in ids)


def printed(shown: RenderableType, *, color: bool = False, width: int = 100) -> str:
    """Return the output for a terminal."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, no_color=not color, legacy_windows=False)
    console.print(shown)
    return out.getvalue()


def linear() -> Trajectory:
    record = Trajectory([0])
    record.add_action([1], [-1.0])
    record.add_action([2], [-1.0])
    record.add_observation([3])
    record.add_forced([4])
    return record


def forked() -> Trajectory:
    record = linear()
    left, right = record.fork(2)
    left.add_action([5], [-1.0])
    right.add_forced([4])
    right.add_action([6], [-1.0])
    record.join((left, right))
    record.add_action([7], [-1.0])
    return record


def text_of(record: Trajectory, decode, *, color: bool = True, legend: bool = True) -> Text:
    """Return all texts of a record's view, one below the other; those of paths in their order."""
    texts = []
    for part in trajectory_view(record, decode, color=color).renderables[0 if legend else 2 :]:
        columns = part.columns if isinstance(part, Table) else []
        texts += [panel.renderable for column in columns for panel in column.cells] if columns else [part]
    return Text("\n").join(texts)


class TestTexts:
    """The texts of a record."""

    def test_without_color(self):
        """Markers show the origin of tokens; neighbours of one origin share a marker."""
        expected = "⟦prompt⟧<user>⟦act⟧think 4⟦obs⟧obs⟦forced⟧forced"
        assert expected == text_of(linear(), decode, color=False, legend=False).plain

    def test_legend(self):
        """A first line explains the markers, or the styles."""
        first, blank, *_rest = text_of(linear(), decode, color=False).plain.split("\n")
        assert first == "⟦prompt⟧ prompt  ⟦act⟧ action  ⟦obs⟧ observation  ⟦forced⟧ forced"
        assert blank == ""
        assert text_of(linear(), decode).plain.startswith("prompt action observation forced\n\n")

    def test_a_branch_shows_replayed_tokens(self):
        """Tokens that another record trains have a name in the first line, and a marker or style."""
        branch = (record := linear()).branched(record.mark())
        lines = text_of(branch, decode, color=False).plain
        assert lines.split("\n")[0].endswith("⟦forced⟧ forced  ⟦replayed⟧ replayed")
        assert lines.count("⟦replayed⟧") > 1
        assert "⟦act⟧ action" in lines
        assert lines.count("⟦act⟧") == 1

    def test_styles(self):
        """In colour each origin has its style, and no marker."""
        text = text_of(linear(), decode, legend=False)
        assert text.plain == "<user>think 4obsforced"
        assert len({str(span.style) for span in text.spans}) == 4

    @few
    @given(trajectories(), st.booleans())
    def test_every_token_is_shown_once(self, record, color):
        """All tokens of any record appear in order."""
        shown = text_of(record, lambda ids: "".join(f"<{i}>" for i in ids), color=color, legend=False).plain
        assert [str(i) for i in record.input_ids] == [part.split(">")[0] for part in shown.split("<")[1:]]

    def test_empty_record(self):
        """Nothing is shown as nothing."""
        assert text_of(Trajectory([]), decode, legend=False).plain == ""


class TestTrajectoryView:
    """Paths side by side."""

    @pytest.mark.parametrize("color", [True, False])
    def test_paths_share_lines(self, color):
        """The first lines of both paths share a line, and the text after the block is below."""
        lines = printed(trajectory_view(forked(), decode, color=color)).splitlines()
        (at,) = [i for i, line in enumerate(lines) if "left path" in line]
        assert "right path" in lines[at]
        assert "path 0" in lines[at - 1]
        assert "path 1" in lines[at - 1]
        assert "done" in lines[at + 2]

    def test_linear_record_is_text(self):
        """Without blocks there is nothing to put side by side."""
        assert all(isinstance(part, Text) for part in trajectory_view(linear(), decode).renderables)

    @few
    @given(trajectories())
    def test_any_record_can_be_shown(self, record):
        """Empty paths and many of them are no trouble."""
        printed(trajectory_view(record, lambda ids: "x" * len(ids)))


class TestHarmlessness:
    """Text of models and tools reaches the terminal as text."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("a\n\tb é 漢 👩\u200d🔬", "a\n\tb é 漢 👩\u200d🔬"),
            ("\x1b[2J", "\\x1b[2J"),
            ("a\r\x08b\x07", "a\\r\\x08b\\x07"),
            ("\x9b31m\x7f", "\\x9b31m\\u007f"),
            ("\u202eabc\u2066", "\\u202eabc\\u2066"),
            ("\u2028\ufeff\u200b", "\\u2028\\ufeff\\u200b"),
            ("\U000e0041", "\\U000e0041"),
            ("\ud800", "\\ud800"),
        ],
    )
    def test_literal(self, text, expected):
        """Control characters and invisible characters become escapes; all others stay."""
        assert expected == literal(text)

    @few
    @given(st.text(st.characters() | st.sampled_from("\x1b\r\x9b\u202e⟦[]"), max_size=30), st.booleans())
    def test_no_control_reaches_the_terminal(self, said, color):
        """Only rich's own escapes, of styles, are printed, whatever was said."""
        record = Trajectory([0])
        record.add_action([1], [-1.0])
        out = printed(trajectory_view(record, lambda _ids: said, color=color))
        assert not set(out) & set("\x1b\r\x9b\x07\x08\u202e")
        out.encode()

    def test_markup_is_text(self):
        """Brackets mean nothing."""
        said = "[bold red]x[/] [link=http://a]y :smile:"
        assert said in printed(text_of(Trajectory([0]), lambda _ids: said))

    def test_markers_cannot_be_imitated(self):
        """A quoted marker is an escape where markers are used, and is literal where they are not."""
        said = "⟦act⟧ me"
        shown = text_of(Trajectory([0]), lambda _ids: said, color=False, legend=False).plain
        assert shown == MARKERS[Origin.PROMPT] + "\\u27e6act\\u27e7 me"
        assert said == text_of(Trajectory([0]), lambda _ids: said, legend=False).plain


def episode(uid: str = "t0", **columns: object) -> EpisodeResult:
    task = Task(messages=({"role": "user", "content": "a"},), uid=uid)
    return EpisodeResult(**{"task": task, "status": Status.COMPLETED, "trajectories": (linear(),)} | columns)


class TestResultsTable:
    """One line for each episode."""

    def test_line(self):
        """The row has its values in the order of the columns."""
        metrics = EpisodeMetrics(total_s=3.25, num_turns=2, num_tool_calls=1)
        result = episode(scores=(TrajectoryScore(value=0.5),), metrics=metrics)
        lines = printed(results_table([result])).splitlines()
        head, line = (re.sub("[┃│ ]+", " ", lines[i]).strip() for i in (1, 3))
        assert head == "episode status reward turns tools tokens s"
        assert line == "t0/0 completed 0.5 2 1 4 3.2"
        assert len(lines) == 5

    def test_failure_names_the_owner(self):
        """An unscored episode has no reward, and a failure says whose it was."""
        fault = Fault(owner="infra", kind="OSError", message="gone")
        out = printed(results_table([episode(status=Status.FAILED, fault=fault)]))
        assert "│ failed (infra) │      - │" in out

    def test_limit(self):
        """A caption says that there are more."""
        out = printed(results_table([episode(f"t{i}") for i in range(5)], limit=2))
        assert "t1/0" in out
        assert "t2/0" not in out
        assert "2 of 5 episodes" in out
        assert "episodes" not in printed(results_table([episode()], limit=2))

    def test_long_and_hostile_names(self):
        """A uid keeps to its line and column, and leaves the numbers room."""
        lines = printed(results_table([episode("a b " * 50), episode("[red]\x1b[2J\n")]), width=80).splitlines()
        assert len(lines) == 6
        assert lines[3].count("│") == 8
        assert "…" in lines[3]
        assert "completed" in lines[3]
        assert "[red]\\x1b[2J\\n/0" in lines[4]


class TestSummaryTable:
    """One line for each entry."""

    def test_lines(self):
        """Nested entries share a line; missing values are dashes."""
        out = printed(summary_table(summarize([episode("x\x1b")], 2.0)), width=140)
        assert "│ episodes            │ 1 " in out
        assert "│ reward              │ scored 0  min -  mean -  max - " in out
        assert "│ action_tokens_per_s │ 1 " in out
        assert "│ slowest             │ x\\x1b/0 " in out
        assert len(out.splitlines()) == 2 + sum(value != {} for value in summarize([episode("x")], 2.0).values())

    def test_values_of_strangers(self):
        """Markup and controls in a summary that was read from a file are text too."""
        out = printed(summary_table({"[b]a": "\x1b]8;;http://x", "nested": {"k": 0.123456}}))
        assert "[b]a" in out
        assert "\\x1b]8;;http://x" in out
        assert "k 0.1235" in out
