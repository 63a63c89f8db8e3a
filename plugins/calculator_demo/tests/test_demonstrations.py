"""Demonstrations are correct without slips and wrong at the given rates."""

import random
from itertools import islice

import pytest

from turnwise_calculator_demo.demonstrations import CLEAN, NoisySolver, SlipRates, Turn
from turnwise_calculator_demo.episodes import answer_text, call_text, parse_call, respond
from turnwise_calculator_demo.expressions import render
from turnwise_calculator_demo.rewards import exact_match
from turnwise_calculator_demo.tasks import Problem, generate_problems

PROBLEMS = list(islice(generate_problems("train", 0), 1000))


def accuracy(rates: SlipRates) -> float:
    """Return the share of problems that a solver with these rates solves."""
    solver = NoisySolver(rates, random.Random(0))
    return sum(exact_match(solver.solve(p)[-1].text, str(p.answer)) for p in PROBLEMS) / len(PROBLEMS)


def solve(rates: SlipRates, problem: Problem, seed: int = 0) -> list[Turn]:
    """Return one demonstration."""
    return NoisySolver(rates, random.Random(seed)).solve(problem)


def test_without_slips_every_demonstration_is_correct() -> None:
    """A demonstration has one call per step with its result, then the correct answer."""
    for problem in PROBLEMS:
        *calls, answer = solve(CLEAN, problem)
        assert [step.expression for step in problem.steps] == [parse_call(turn.text) for turn in calls]
        assert [str(step.result) for step in problem.steps] == [turn.response for turn in calls]
        assert Turn(answer_text(problem.answer), None) == answer


@pytest.mark.parametrize("rates", [SlipRates(digit=0.2), SlipRates(order=0.4), SlipRates(early=0.4)])
def test_each_kind_of_slip_costs_answers(rates: SlipRates) -> None:
    """Every kind of slip makes some answers wrong, but not all."""
    assert 0.1 < accuracy(rates) < 0.95


def test_a_rushed_call_is_rejected_without_cost() -> None:
    """The calculator rejects the whole expression, and the following steps give the correct answer."""
    assert accuracy(SlipRates(rushed=0.4)) == 1.0
    problem = next(p for p in PROBLEMS if len(p.steps) == 2)
    rejected = call_text(render(problem.expression))
    seen = {solve(SlipRates(rushed=0.49), problem, seed)[0] for seed in range(20)}
    assert Turn(rejected, "Error: only one operation per call") in seen


def test_every_response_is_the_tools_own() -> None:
    """Every response is the tool's real output, also after a slip."""
    solver = NoisySolver(SlipRates(digit=0.3, order=0.3, early=0.3, rushed=0.3), random.Random(0))
    for problem in PROBLEMS[:300]:
        for turn in solver.solve(problem)[:-1]:
            expression = parse_call(turn.text)
            assert expression is not None
            assert respond(expression) == turn.response


@pytest.mark.parametrize("rate", [-0.1, 0.5, 1.0])
def test_a_slip_is_never_the_most_likely_choice(rate: float) -> None:
    """Rates of 0.5 and more are rejected."""
    with pytest.raises(ValueError, match="digit"):
        SlipRates(digit=rate)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 5.",
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call>\n[]\n</tool_call>",
        "<tool_call>\n3\n</tool_call>",
        "<tool_call>\nnot json\n</tool_call>",
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "calculator", "arguments": null}\n</tool_call>',
        '<tool_call>\n{"name": "other", "arguments": {"expression": "1 + 2"}}\n</tool_call>',
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_malformed_call_parses_as_none(text: str) -> None:
    """Any text without a complete calculator call gives None and raises no exception."""
    assert parse_call(text) is None


def test_a_call_round_trips() -> None:
    """The evaluator parses the calls of the demonstrations, which are in Hermes format."""
    text = call_text("23 + 48")
    expected = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "23 + 48"}}\n</tool_call>'
    assert expected == text
    assert parse_call(text) == "23 + 48"
    assert respond("23 + 48") == "71"
    assert respond("1 / 0") == "Error: division by zero"
