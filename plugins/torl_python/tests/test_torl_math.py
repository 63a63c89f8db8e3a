"""What `torl_math` does beyond what every reward must."""

import asyncio
import sys

import pytest
from attrs import define, field

from turnwise import Task
from turnwise.errors import DataError, InfrastructureError
from turnwise_torl_python import judge as judge_module
from turnwise_torl_python import make_torl_math
from turnwise_torl_python.config import TorlMathConfig
from turnwise_torl_python.judge import Judge
from turnwise_torl_python.judge_process import equals

CODE = "```python\nprint(1)\n```\n```output"


@define
class Finished:
    """What a reward reads of an episode."""

    messages: list
    memory: dict
    task: Task = field(
        factory=lambda: Task(messages=({"role": "user", "content": "?"},), uid="t", ground_truth="\\frac{1}{2}")
    )


def score(*turns, successes=0, truth="\\frac{1}{2}", **options):
    """Score an episode whose model wrote these turns, with outputs between them."""
    messages = []
    for turn in turns:
        messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": "\\boxed{0.5}"}]
    task = Task(messages=({"role": "user", "content": "?"},), uid="t", ground_truth=truth)
    episode = Finished(messages, {"successes": successes}, task)
    return asyncio.run(make_torl_math(TorlMathConfig(**options), None).score(episode))


def test_right_and_wrong():
    """Plus and minus one; an answer in other words is right, and what a program printed is no answer."""
    assert score("It is \\boxed{0.5}.").value == 1.0
    assert score("It is \\boxed{0.5}, no \\boxed{1}.").value == -1.0
    assert score("It is 0.5.").value == -1.0
    assert score("\\boxed{7}", truth=7).value == 1.0
    assert score("\\boxed{x}", "y").value == -1.0


@pytest.mark.parametrize(
    ("turns", "successes", "penalty"),
    [
        (["\\boxed{0.5}"], 0, 0.0),
        ([CODE, "\\boxed{0.5}"], 1, 0.0),
        ([CODE, "\\boxed{0.5}"], 0, -0.5),
        ([CODE, CODE, "\\boxed{0.5}"], 1, 0.0),
        (["```python\nprint(1)\n```\nIt is \\boxed{0.5}"], 0, -0.5),
        (["```python\nopen, so no code was written \\boxed{0.5}"], 0, 0.0),
    ],
)
def test_the_penalty_counts_all_calls(turns, successes, penalty):
    """It is for code that never ran without error: one good call frees of it, and so does no code."""
    assert score(*turns, successes=successes).value == 1.0
    scored = score(*turns, successes=successes, error_penalty=-0.5)
    assert scored.value == 1.0 + penalty
    assert scored.extra == {"correct": 1.0, "code_never_ran": float(penalty != 0)}


def test_a_task_without_ground_truth():
    """It is named; nobody is right or wrong."""
    with pytest.raises(DataError, match=r"task 't' \(row 0\) has no ground truth"):
        score("\\boxed{1}", truth=None)


def test_a_penalty_is_no_bonus():
    """The sign is checked."""
    with pytest.raises(ValueError, match="error_penalty"):
        TorlMathConfig(error_penalty=0.5)


class TestJudge:
    """Answers are compared in a process of its own."""

    def test_an_answer_that_never_ends_is_wrong(self):
        """It costs the time limit; the next answer is compared as usual."""
        judge = Judge(timeout_s=1.0, num_processes=1)
        try:
            assert not asyncio.run(judge.equals("10^{10}", "10^{10^{10^{10}}}"))
            assert asyncio.run(judge.equals("\\frac{1}{2}", "0.50"))
            assert not asyncio.run(judge.equals("\\frac{1}{2}", "0.51"))
        finally:
            judge.close()

    def test_many_at_once(self):
        """Each gets its own verdict."""
        judge = Judge(timeout_s=20.0, num_processes=2)

        async def ask():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(judge.equals("\\frac{1}{2}", f"{n}/20")) for n in range(20)]
            return [task.result() for task in tasks]

        try:
            assert asyncio.run(ask()) == [n == 10 for n in range(20)]
        finally:
            judge.close()

    def test_plain_answers_need_no_process(self):
        """Integers and equal texts; empty and endless answers are wrong at once."""
        judge = Judge(timeout_s=1.0, num_processes=1)
        cases = [
            ("71", " 71 ", True),
            ("71", "072", False),
            ("$x$", "x", True),
            ("x", "", False),
            ("x", "1" * 3000, False),
        ]
        for truth, answer, verdict in cases:
            assert asyncio.run(judge.equals(truth, answer)) is verdict
        judge.close()
        assert not judge._running

    def test_a_process_that_died_is_replaced(self):
        """Nobody is punished for it."""
        judge = Judge(timeout_s=20.0, num_processes=1)
        try:
            assert asyncio.run(judge.equals("\\frac{1}{2}", "0.50"))
            (process,) = judge._running
            process.kill()
            process.wait()
            assert asyncio.run(judge.equals("\\frac{1}{2}", "0.50"))
        finally:
            judge.close()

    def test_a_process_that_does_not_start_is_an_infrastructure_failure(self, monkeypatch):
        """Never a wrong answer."""
        monkeypatch.setattr(judge_module.sys, "executable", sys.executable)
        monkeypatch.setenv("PYTHONHOME", "/nowhere")
        judge = Judge(timeout_s=1.0, num_processes=1)
        with pytest.raises(InfrastructureError, match="math-verify does not start"):
            asyncio.run(judge.equals("\\frac{1}{2}", "0.50"))
        judge.close()

    def test_nothing_that_a_model_wrote_is_evaluated(self, tmp_path):
        """An answer that is a Python expression is read as LaTeX."""
        target = tmp_path / "written"
        judge = Judge(timeout_s=20.0, num_processes=1)
        try:
            assert not asyncio.run(judge.equals("1", f"__import__('pathlib').Path('{target}').touch()"))
        finally:
            judge.close()
        assert not target.exists()


@pytest.mark.filterwarnings("ignore")
def test_the_comparison_itself():
    """Math-verify's view of equality."""
    assert equals("\\sqrt{12}", "2\\sqrt{3}")
    assert equals("\\{1, 2\\}", "\\{2, 1\\}")
    assert equals("1234", "1,234")
    assert not equals("(1, 2)", "(2, 1)")
