"""Tests of `torl_math` beyond the conformance suite: the penalty, and the verification of answers."""

import asyncio
import os
import signal
import sys

import pytest
from attrs import define, field

from turnwise import Task
from turnwise.errors import DataError, InfrastructureError
from turnwise_torl_python import make_torl_math
from turnwise_torl_python import verifier as verifier_module
from turnwise_torl_python.config import TorlMathConfig
from turnwise_torl_python.verifier import AnswerVerifier
from turnwise_torl_python.verifier_process import equals

pytestmark = pytest.mark.usefixtures("starts_a_process")

CODE = "```python\nprint(1)\n```\n```output"


@define
class Finished:
    """The parts of an episode that the reward reads."""

    messages: list
    memory: dict
    task: Task = field(
        factory=lambda: Task(messages=({"role": "user", "content": "?"},), uid="t", ground_truth="\\frac{1}{2}")
    )


def score(*turns, successes=0, truth="\\frac{1}{2}", **options):
    """Score an episode whose model wrote the given turns, with outputs between them."""
    messages = []
    for turn in turns:
        messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": "\\boxed{0.5}"}]
    task = Task(messages=({"role": "user", "content": "?"},), uid="t", ground_truth=truth)
    episode = Finished(messages, {"successes": successes}, task)
    return asyncio.run(make_torl_math(TorlMathConfig(**options), None).score(episode))


def test_right_and_wrong():
    """An equal answer in another notation scores 1, and a box that a program printed is no answer."""
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
    """It applies if the model wrote code and no call of the episode succeeded."""
    assert score(*turns, successes=successes).value == 1.0
    scored = score(*turns, successes=successes, error_penalty=-0.5)
    assert scored.value == 1.0 + penalty
    assert scored.extra == {"correct": 1.0, "code_never_ran": float(penalty != 0)}


def test_a_task_without_ground_truth():
    """The error names the task and its row."""
    with pytest.raises(DataError, match=r"task 't' \(row 0\) has no ground truth"):
        score("\\boxed{1}", truth=None)


def test_a_positive_penalty_is_refused():
    """A positive penalty is refused."""
    with pytest.raises(ValueError, match="error_penalty"):
        TorlMathConfig(error_penalty=0.5)


class TestVerifier:
    """Comparisons in separate processes."""

    @pytest.mark.slow
    def test_an_answer_that_never_ends_is_wrong(self):
        """It is wrong after the time limit, and the next answer is compared as usual."""
        for timeout_s in (1.0, 8.0, 60.0):  # the first in which a busy machine compares usual answers
            verifier = AnswerVerifier(timeout_s=timeout_s, num_processes=1)
            try:
                endless = asyncio.run(verifier.equals("10^{10}", "10^{10^{10^{10}}}"))
                usual = [asyncio.run(verifier.equals("\\frac{1}{2}", answer)) for answer in ("0.50", "0.51")]
            finally:
                verifier.close()
            if usual[0]:
                break
        assert (False, [True, False]) == (endless, usual)

    def test_many_at_once(self):
        """Each concurrent comparison returns its own verdict."""
        verifier = AnswerVerifier(timeout_s=60.0, num_processes=2)

        async def ask():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(verifier.equals("\\frac{1}{2}", f"{n}/20")) for n in range(20)]
            return [task.result() for task in tasks]

        try:
            assert asyncio.run(ask()) == [n == 10 for n in range(20)]
        finally:
            verifier.close()

    def test_plain_answers_need_no_process(self):
        """Integers and equal texts are compared directly; empty and very long answers are wrong."""
        verifier = AnswerVerifier(timeout_s=1.0, num_processes=1)
        cases = [
            ("71", " 71 ", True),
            ("71", "072", False),
            ("$x$", "x", True),
            ("x", "", False),
            ("x", "1" * 3000, False),
        ]
        for truth, answer, verdict in cases:
            assert asyncio.run(verifier.equals(truth, answer)) is verdict
        verifier.close()
        assert not verifier._running

    def test_a_process_that_died_is_replaced(self):
        """The next comparison starts a new process and is right."""
        verifier = AnswerVerifier(timeout_s=60.0, num_processes=1)
        try:
            assert asyncio.run(verifier.equals("\\frac{1}{2}", "0.50"))
            (process,) = verifier._running
            process.kill()
            process.wait()
            assert asyncio.run(verifier.equals("\\frac{1}{2}", "0.50"))
        finally:
            verifier.close()

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
    def test_a_comparison_killed_from_outside_is_no_wrong_answer(self, monkeypatch, number):
        """The failure belongs to the infrastructure, names the signal, and the next comparison is right."""
        verifier = AnswerVerifier(timeout_s=60.0, num_processes=1)
        request = verifier_module._request

        def kill_and_request(process, line):
            monkeypatch.setattr(verifier_module, "_request", request)
            for sent in (signal.SIGSTOP, number, signal.SIGCONT):  # it cannot answer before it dies
                process.send_signal(sent)
            return request(process, line)

        monkeypatch.setattr(verifier_module, "_request", kill_and_request)
        try:
            with pytest.raises(InfrastructureError, match=signal.Signals(number).name):
                asyncio.run(verifier.equals("\\frac{1}{2}", "0.50"))
            assert asyncio.run(verifier.equals("\\frac{1}{2}", "0.50"))
        finally:
            verifier.close()

    def test_a_process_that_dies_before_the_request_is_no_wrong_answer(self, monkeypatch):
        """Its pipe is broken although it was alive a moment ago."""
        verifier = AnswerVerifier(timeout_s=60.0, num_processes=1)
        request = verifier_module._request

        def end_and_request(process, line):
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            return request(process, line)

        monkeypatch.setattr(verifier_module, "_request", end_and_request)
        try:
            with pytest.raises(InfrastructureError, match="SIGKILL"):
                asyncio.run(verifier.equals("\\frac{1}{2}", "0.50"))
        finally:
            verifier.close()

    def test_an_answer_that_exhausts_the_memory_is_wrong(self, monkeypatch):
        """The process has a limit, and reports that a comparison went beyond it."""
        script = (
            "from turnwise_torl_python import verifier_process as p\n"
            "p.equals = lambda truth, answer: answer == '0.5' or len(bytearray(4 << 30))\np.main()"
        )
        popen = verifier_module.subprocess.Popen

        def start(command, **options):
            return popen([command[0], "-c", script, command[-1]], **options)

        monkeypatch.setattr(verifier_module.subprocess, "Popen", start)
        verifier = AnswerVerifier(timeout_s=60.0, num_processes=1)
        try:
            assert asyncio.run(verifier.equals("\\frac{1}{2}", "x^2")) is False
        finally:
            verifier.close()

    def test_a_process_that_does_not_start_is_an_infrastructure_failure(self, monkeypatch):
        """The failure is not reported as a wrong answer."""
        monkeypatch.setattr(verifier_module.sys, "executable", sys.executable)
        monkeypatch.setenv("PYTHONHOME", "/nowhere")
        verifier = AnswerVerifier(timeout_s=60.0, num_processes=1)
        with pytest.raises(InfrastructureError, match="math-verify does not start"):
            asyncio.run(verifier.equals("\\frac{1}{2}", "0.50"))
        verifier.close()

    def test_no_answer_is_evaluated_as_python(self, tmp_path):
        """A Python expression is parsed as LaTeX."""
        target = tmp_path / "written"
        verifier = AnswerVerifier(timeout_s=60.0, num_processes=1)
        try:
            assert not asyncio.run(verifier.equals("1", f"__import__('pathlib').Path('{target}').touch()"))
        finally:
            verifier.close()
        assert not target.exists()


@pytest.mark.filterwarnings("ignore")
def test_the_comparison_itself():
    """Equality is defined by math-verify."""
    assert equals("\\sqrt{12}", "2\\sqrt{3}")
    assert equals("\\{1, 2\\}", "\\{2, 1\\}")
    assert equals("1234", "1,234")
    assert not equals("(1, 2)", "(2, 1)")
