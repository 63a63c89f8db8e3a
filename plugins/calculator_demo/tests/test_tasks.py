"""The tasks are deterministic, solvable in one to three calls, and split without overlap."""

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_calculator_demo.calculator import calculator, evaluate_expression
from turnwise_calculator_demo.expressions import (
    Operand,
    Operation,
    apply_symbol,
    left_to_right,
    next_operation,
    render,
    signature,
    solve,
)
from turnwise_calculator_demo.rewards import exact_match
from turnwise_calculator_demo.tasks import assign_split, generate_problems, generate_rows, main

EXPRESSIONS = st.recursive(
    st.integers(0, 99),
    lambda inner: st.builds(Operation, inner, st.sampled_from("+-*"), inner),
    max_leaves=5,
)


@given(EXPRESSIONS)
def test_a_rendered_expression_has_the_value_of_its_steps(expression: Operand) -> None:
    """The rendered text evaluates to the value of the tree."""
    expected = solve(expression)[-1].result if isinstance(expression, Operation) else expression
    assert expected == evaluate_expression(render(expression))


@given(EXPRESSIONS)
def test_each_step_is_one_call_of_the_calculator(expression: Operand) -> None:
    """The tool computes every step and returns its result."""
    for step in solve(expression):
        assert str(step.result) == calculator(step.expression)


@given(EXPRESSIONS, EXPRESSIONS, st.sampled_from("+-*"))
def test_the_order_of_operands_does_not_change_the_split(left: Operand, right: Operand, symbol: str) -> None:
    """An expression and its reordered form are in the same split."""
    one, other = Operation(left, symbol, right), Operation(right, symbol, left)
    assert signature(one) == signature(other)
    assert assign_split(one) == assign_split(other) == assign_split(left_to_right(one))


@pytest.mark.slow
def test_splits_are_disjoint() -> None:
    """Training and held-out problems share no signature, for several seeds."""
    train, test = (
        {signature(p.expression) for seed in range(3) for p in islice(generate_problems(split, seed), 2000)}
        for split in ("train", "test")
    )
    assert not train & test


def test_the_same_seed_gives_the_same_rows() -> None:
    """The seed determines the rows, and a longer file starts with the rows of a shorter one."""
    assert generate_rows("test", 20, seed=3) == generate_rows("test", 50, seed=3)[:20]
    assert generate_rows("test", 20, seed=3) != generate_rows("test", 20, seed=4)


def test_the_first_row_is_pinned() -> None:
    """The stream of a seed does not change, so published results stay comparable."""
    first = generate_rows("test", 1, seed=0)[0]
    assert first["prompt"] == [{"role": "user", "content": "Work out 47 * (95 - 68)."}]
    assert first["reward_model"] == {"ground_truth": "1269"}
    assert first["agent_name"] == "tool_agent"
    assert first["data_source"] == "calculator"
    assert first["extra_info"] == {"index": 0, "split": "test", "expression": "47 * (95 - 68)", "num_steps": 2}


def test_most_problems_take_two_calls() -> None:
    """Problems have one, two or three steps, and more than half have two."""
    counts = [len(problem.steps) for problem in islice(generate_problems("test", 0), 1000)]
    assert {1, 2, 3} == set(counts)
    assert counts.count(2) > 500


def test_rows_are_distinct_and_correct() -> None:
    """No expression occurs twice, and the ground truth is its value."""
    rows = generate_rows("test", 300, seed=1)
    expressions = [row["extra_info"]["expression"] for row in rows]
    assert len(rows) == len(set(expressions))
    for row, expression in zip(rows, expressions, strict=True):
        assert str(evaluate_expression(expression)) == row["reward_model"]["ground_truth"]
        assert expression in row["prompt"][0]["content"]


def test_the_question_alone_is_no_answer() -> None:
    """Echoing the question scores 0 on nearly all tasks."""
    rows = generate_rows("test", 300, seed=1)
    hits = sum(exact_match(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in rows)
    assert hits < 15


def test_an_unknown_symbol_is_an_error() -> None:
    """A symbol other than the three of the tasks raises ValueError."""
    with pytest.raises(ValueError, match="unknown symbol '/'"):
        apply_symbol(1, "/", 2)


def test_a_number_needs_no_steps() -> None:
    """A plain number has no steps and is its own value."""
    assert solve(5) == ()
    assert next_operation(5) is None
    assert left_to_right(5) == 5


def test_the_command_writes_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes the function's rows, one per line."""
    path = tmp_path / "tasks.jsonl"
    main(["--split", "test", "--num", "5", "--seed", "2", "--out", str(path)])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert generate_rows("test", 5, seed=2) == rows
    assert "wrote 5 test tasks" in capsys.readouterr().out


def test_harder_tasks(tmp_path, capsys):
    """--step-weights sets the mix, as in the example's training file; a bad value exits with a one-line error."""
    path = tmp_path / "rows.jsonl"
    main(["--num", "1024", "--step-weights", "5,50,45", "--out", str(path)])

    assert (Path(__file__).parents[3] / "examples" / "train_calculator.jsonl").read_text() == path.read_text()
    for bad in ("5,50", "5,-1,2", "0,0,0", "a,b,c"):
        with pytest.raises(SystemExit):
            main(["--step-weights", bad, "--out", str(path)])
        assert "expected three integers >= 0" in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """--help ends with example commands."""
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "examples:" in capsys.readouterr().out
