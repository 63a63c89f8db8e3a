"""The reward compares the last integer of the last text, whatever text surrounds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_calculator_demo.rewards import exact_match, final_answer

RIGHT = [
    "The answer is 497.",
    "497",
    "#### 497",
    "#### 497\n",
    r"So it is \boxed{497}.",
    "**497**",
    "$497$",
    "497.0",
    "0497",
    "+497",
    "= 497!",
    "First 71, then 497.",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call> The answer is 497.',
    "The answer is 497<tool_call>3</tool_call>",
    "The answer is 497.<tool_call>\n3",
    "500 - 3 = 497",
]
WRONG = [
    "",
    "no number",
    "The answer is 71.",
    "497 or 498",
    "-497",
    "\u2212497",
    "497.5",
    "4970",
    "1,497",
    "x497",
    "497th",
    "4 97",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "71 * 497"}}\n</tool_call>',
    '<tool_call>\n{"expression": "497',
    "\u0664\u0669\u0667",
    "NaN",
]


@pytest.mark.parametrize("text", RIGHT)
def test_right_answers(text: str) -> None:
    """Every usual spelling of the correct number scores 1."""
    assert exact_match(text, "497") == 1.0


@pytest.mark.parametrize("text", WRONG)
def test_wrong_answers(text: str) -> None:
    """Other numbers, no number, and the correct number inside a tool call score 0."""
    assert exact_match(text, "497") == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-25", "-25"),
        ("The answer is \u221225.", "-25"),
        ("1,234,567", "1234567"),
        ("5 - 3", "3"),
        ("5-3", "3"),
        ("(2) - 3", "3"),
        ("-0", "0"),
        ("00", "0"),
        ("12.50", None),
        ("1.2.3", None),
        ("12,34", None),
    ],
)
def test_final_answer(text: str, expected: str | None) -> None:
    """Signs, separators and zeros are normalised; a minus between two numbers is not a sign."""
    assert expected == final_answer(text)


@given(st.integers(), st.text(st.characters(categories=["L", "Zs"])))
def test_any_integer_matches_itself(number: int, words: str) -> None:
    """The correct number scores 1 after any words, and the next number scores 0."""
    text = f"{words} : {number} ."
    assert exact_match(text, str(number)) == 1.0
    assert exact_match(text, str(number + 1)) == 0.0


@given(st.text())
def test_any_text_scores_zero_or_one(text: str) -> None:
    """Any text scores 0 or 1 and raises no exception."""
    assert exact_match(text, "497") in (0.0, 1.0)


def test_long_texts_are_scored() -> None:
    """Numbers beyond Python's int-parsing limit and adversarial long texts are scored quickly."""
    assert exact_match("9" * 100_000, "9" * 100_000) == 1.0
    assert exact_match("1," * 100_000, "1") == 0.0
    assert exact_match("<tool_call>" * 100_000, "1") == 0.0
    assert exact_match("1.1." * 100_000, "1") == 0.0


@pytest.mark.parametrize("ground_truth", ["", "abc", "4.5"])
def test_a_ground_truth_must_be_an_integer(ground_truth: str) -> None:
    """A ground truth that is not an integer raises instead of scoring."""
    with pytest.raises(ValueError, match="ground truth"):
        exact_match("497", ground_truth)
