"""The view of a training: a table on a terminal, log lines elsewhere, and the pictures and tables at the end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from turnwise.events.observer import RunWaiting, Wait
from turnwise_grpo_trainer.report.learning_curve import as_markdown, as_table, compare_validations, draw_curve
from turnwise_grpo_trainer.report.live_view import TrainView

STEP = {"reward/mean": 0.25, "length/mean": 12.4, "seconds/step": 1.5, "not/shown": 1.0}
VALIDATION = {
    "validation/reward/mean": 0.75,
    "validation/reward/low": 0.625,
    "validation/reward/high": 0.875,
    "validation/seconds": 2.0,
}


def show(*, terminal, steps=1):
    """Show some steps and a validation; return the printed text and the log lines."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with capture_logs() as logs, TrainView(30, 8, console) as view:
        for step in range(1, steps + 1):
            view.episode(None)
            view.step(step, STEP)
        view.validation(steps, VALIDATION)
    return console.file.getvalue(), logs


def test_a_terminal_shows_a_table():
    """The last state has a row for each step and validation, and no log line is written."""
    text, logs = show(terminal=True)

    assert [] == logs
    last = text[text.rindex("reward") :]
    assert "0.250" in last
    assert "1 held out" in last
    assert "0.750" in last


def test_a_terminal_shows_the_last_steps():
    """The table has a bounded number of rows, the newest ones."""
    text, _ = show(terminal=True, steps=20)
    first_cells = [line.split("│")[1].strip() for line in text[text.rindex("reward") :].splitlines() if "│" in line]

    assert [*map(str, range(10, 21)), "20 held out"] == [cell for cell in first_cells if cell]


def test_without_a_terminal_there_are_log_lines():
    """Each step and validation is one log line, with the formatted metrics that the table would have."""
    text, logs = show(terminal=False)

    assert "" == text
    step, validation = logs
    assert ("step", 1, "0.250", "12") == (step["event"], step["step"], step["reward"], step["length"])
    assert not {"not/shown", "kl"} & step.keys()
    assert ("validation", "0.750", "2.0") == (validation["event"], validation["reward"], validation["seconds"])
    assert "0.625, 0.875" == validation["interval"]


@pytest.mark.parametrize("terminal", [True, False])
def test_warnings_are_in_the_log_and_on_the_terminal(terminal):
    """A warning is one log line; on a terminal it stays below the table."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with capture_logs() as logs, TrainView(30, 8, console) as view:
        view.warning("steps are mostly noise")
        for step in range(1, 3):
            view.step(step, STEP)

    assert ["steps are mostly noise"] == [line["event"] for line in logs if line["log_level"] == "warning"]
    last = console.file.getvalue()
    assert "warning: steps are mostly noise" in last[last.rindex("reward") :] if terminal else last == ""


def test_an_activity_replaces_the_progress_label():
    """During a checkpoint the terminal says so, and afterwards it shows episodes again."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with TrainView(2, 8, console) as view:
        with view.activity("checkpoint"):
            during = render(console, view)
        after = render(console, view)

    assert "checkpoint" in during
    assert "checkpoint" not in after
    assert "episodes" in after


def render(console, view):
    """Return the current table as text."""
    with console.capture() as capture:
        console.print(view._table())
    return capture.get()


def test_the_curve_is_a_picture(tmp_path):
    """A PNG is written from steps and validations, also if a metric is missing, null or 0."""
    metrics = [{"step": 0, **VALIDATION}, {"step": 1, **STEP, "gap/max": 0.0}, {"step": 2, "reward/mean": None}]

    draw_curve(metrics, tmp_path / "curve.png", title="title")
    draw_curve([], tmp_path / "empty.png")

    assert all(b"\x89PNG" == path.read_bytes()[:4] for path in tmp_path.iterdir())
    assert 2 == len(list(tmp_path.iterdir()))


@pytest.mark.parametrize("order", [[0, 4, 8], [8, 4, 0]])
def test_first_and_last_validation_are_compared(order):
    """The rows compare the lowest with the highest step, and have only metrics that both validations have."""
    validations = {
        step: {"validation/reward/mean": step / 10, "validation/turns/mean": 2.0} | ({"x": 1.0} if step else {})
        for step in order
    }

    rows = compare_validations(validations)

    assert [("", "before", "after"), ("reward", "0.000", "0.800"), ("turns", "2.000", "2.000")] == rows
    assert "| reward | 0.000 | 0.800 |" in as_markdown(rows)
    console = Console(file=io.StringIO(), width=100)
    console.print(as_table(rows))
    assert "0.800" in console.file.getvalue()


def test_the_best_step_has_a_column():
    """The best step is shown between first and last, unless it is one of them."""
    validations = {step: {"validation/reward/mean": value} for step, value in [(0, 0.1), (4, 0.9), (8, 0.5)]}

    best = [("", "before", "best (step 4)", "after"), ("reward", "0.100", "0.900", "0.500")]
    assert best == compare_validations(validations, 4)
    assert "| held-out tasks | before | best (step 4) | after |\n| --- | --- | --- | --- |" in as_markdown(best)
    for end in (0, 8):
        assert [("", "before", "after"), ("reward", "0.100", "0.500")] == compare_validations(validations, end)


def test_a_held_out_reward_has_its_interval():
    """The terminal and the report show the 95 % interval of the reward; brackets are no markup."""
    first = {"validation/reward/mean": 0.5, "validation/reward/low": 0.41, "validation/reward/high": 0.6}
    rows = compare_validations({0: first, 3: {**first, "validation/reward/mean": 0.55}})
    console = Console(file=io.StringIO(), width=120)
    console.print(as_table(rows))

    assert [("reward", "0.500 [0.410, 0.600]", "0.550 [0.410, 0.600]")] == rows[1:]
    assert "0.550 [0.410, 0.600]" in console.file.getvalue()
    assert "| reward | 0.500 [0.410, 0.600] |" in as_markdown(rows)


def test_no_validation_has_no_rows():
    """A training without held-out tasks has nothing to compare."""
    assert [] == compare_validations({})
    assert "" == as_markdown([])


def test_a_terminal_shows_the_waits_of_the_training():
    """While nothing happens, and not afterwards."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with TrainView(30, 8, console) as view:
        view.on_run_waiting(RunWaiting(seconds=20.0, waits=(Wait(part="the update of the policy", seconds=20.0),)))
        assert "waits for the update of the policy for 20 s" in _text(view)
        view.on_run_waiting(RunWaiting(seconds=0.0))
        assert "waits" not in _text(view)


def _text(view):
    console = Console(file=io.StringIO(), width=200)
    console.print(view._table())
    return console.file.getvalue()
