"""The work of `benchmarks/structured_training.py`: its tasks, its scores, and its curve."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TASKS = (BENCHMARKS.parent / "examples/train_calculator.jsonl").read_text(encoding="utf-8").splitlines()


def load(path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def calculations(monkeypatch):
    return load(BENCHMARKS / "structured_agents/calculations.py", monkeypatch)


def follow(calculations, *, wrong_at=None, num_retries=0):
    """A program that knows each operation; one of them is wrong, and the first one needs retries."""

    def ask(_session, _question, counts):
        def next_operation(expression, results):
            counts.update(replies=1, valid=1)
            if not results:
                counts.update(retries=num_retries, replies=num_retries)
            return "1 + 1 + 1" if len(results) == wrong_at else calculations.solve_steps(expression)[0][1]

        return next_operation

    return ask


def test_the_steps_of_each_task_give_its_answer(calculations):
    """The demonstrations and the scores use the rules of arithmetic; each retry halves the score."""
    for task in map(json.loads, TASKS):
        question, truth = task["prompt"][-1]["content"], task["reward_model"]["ground_truth"]
        steps = calculations.solve_steps(calculations.read_expression(question))
        assert truth == calculations.reduce(*steps[-1])
        score, counts = calculations.solve(follow(calculations, num_retries=2), {}, question)
        assert (0.25, len(steps) + 2, len(steps)) == (score, counts["replies"], counts["valid"])


@pytest.mark.parametrize("operation", ["1 + 1 + 1", "4", "4 + 4", "14 + 70"])
def test_what_is_no_operation_of_the_expression_scores_nothing(calculations, operation):
    """An operation that is no operation, or of another expression."""
    with pytest.raises(ValueError, match="operation"):
        calculations.reduce("(14 + 7) * 7", operation)
    assert 0.0 == calculations.solve(follow(calculations, wrong_at=0), {}, "What is (14 + 7) * 7?")[0]


def test_the_curve_has_a_line_for_each_step(tmp_path, monkeypatch):
    """Means over the episodes of a step; valid replies are a share of all."""
    module = load(BENCHMARKS / "structured_training.py", monkeypatch)
    lines = [(2, 1.0, 0, 2, 2), (1, 0.0, 2, 3, 0), (1, 0.5, 1, 3, 3)]
    names = ("step", "score", "retries", "replies", "valid")
    log = tmp_path / "program.jsonl"
    log.write_text("".join(json.dumps(dict(zip(names, line, strict=True))) + "\n" for line in lines))

    first, second = module.read_curve(log)

    assert {"step": 1, "episodes": 2, "reward": 0.25, "valid": 0.5, "retries": 1.5} == first
    assert {"step": 2, "episodes": 1, "reward": 1.0, "valid": 1.0, "retries": 0.0} == second
    module.draw([first, second], "a program", tmp_path / "curve.svg")
    assert "share of valid replies" in (tmp_path / "curve.svg").read_text()
