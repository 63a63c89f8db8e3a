"""The calculator computes allowed expressions exactly and rejects all others with a clear ValueError."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_calculator_demo.calculator import (
    MAX_DENOMINATOR,
    MAX_LENGTH,
    MAX_MAGNITUDE,
    calculator,
    evaluate_expression,
)

ATTACKS = [
    "__import__('os').system('true')",
    "().__class__",
    "exit()",
    "x + 1",
    "abs(3)",
    "[1][0]",
    "1 if 1 else 2",
    "lambda: 1",
    "True + 1",
    "'a' * 9",
    "f'{1}'",
    "1 == 1",
    "1 << 9",
    "~1",
    "2 @ 3",
    "1 and 2",
    "(1)(2)",
    "3 +",
    "1; 2",
    "1\x00 + 1",
    "1 +\t2",
    "1 + # 2",
    "0x10 + 1",
    "1_000 + 1",
    "2j * 2",
    "\u0663 + 1",
    "\uff13 + 1",
    "\u00b2 + 1",
    "nan + 1",
    "inf + 1",
    "1e999 + 1",
    "9" * 400,
    "9" * 99 + "9",
    "9 ** 9 ** 9",
    "9 ** 999999999",
    "2 ** 51",
    "999999999999999 ** 50",
    "10 ** 15 * 10",
    "0.5 ** 50",
    "2 ** 0.5",
    "0 ** -1",
    "1 / 0",
    "1 // 0",
    "1 % 0",
    "(" * 49 + "1" + ")" * 49 + "+",
    "(" * 500 + "1" + ")" * 500,
    "-" * 500 + "1",
    "()",
    "(1, 2)",
    "007 + 1",
    "",
    "   ",
]


@pytest.mark.parametrize("expression", ATTACKS)
def test_rejects_everything_but_arithmetic(expression: str) -> None:
    """Names, calls, other syntax, huge numbers and non-ASCII digits raise ValueError and no other exception."""
    with pytest.raises(ValueError, match=r"\w"):
        evaluate_expression(expression)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("23 + 48", "71"),
        ("71*7", "497"),
        ("3 - 10", "-7"),
        ("-3 - -10", "7"),
        ("0.1 + 0.2", "0.3"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("1 / 3", "0.3333333333"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("497", "497"),
        (" 1 + 1\n", "2"),
        ("1.50", "1.5"),
        ("-0", "0"),
    ],
)
def test_computes_one_operation(expression: str, expected: str) -> None:
    """Integer results print as integers, others as decimals."""
    assert expected == calculator(expression)


def test_one_operation_per_call() -> None:
    """The tool rejects several operations per call; the evaluator itself computes them."""
    with pytest.raises(ValueError, match="only one operation per call"):
        calculator("(23 + 48) * 7")
    with pytest.raises(ValueError, match="only 2 operations per call"):
        evaluate_expression("1 + 2 + 3 + 4", max_operations=2)
    assert Fraction(497) == evaluate_expression("(23 + 48) * 7")


def test_errors_state_the_reason() -> None:
    """The message tells the model how to correct its call."""
    with pytest.raises(ValueError, match=r"^division by zero$"):
        calculator("4 / 0")
    with pytest.raises(ValueError, match=f"longer than {MAX_LENGTH} characters"):
        calculator("1" * (MAX_LENGTH + 1))
    with pytest.raises(ValueError, match="only numbers"):
        calculator("import os")
    with pytest.raises(ValueError, match="exponent"):
        calculator("9 ** 99")


@given(st.integers(-(10**6), 10**6), st.sampled_from("+-*"), st.integers(-(10**6), 10**6))
def test_agrees_with_python_on_integers(left: int, symbol: str, right: int) -> None:
    """Integer arithmetic agrees with Python's."""
    expected = {"+": left + right, "-": left - right, "*": left * right}[symbol]
    assert str(expected) == calculator(f"{left} {symbol} {right}")


@given(st.text() | st.text("0123456789.+-*/%() ", max_size=MAX_LENGTH + 1))
def test_any_text_gives_a_bounded_number_or_a_value_error(text: str) -> None:
    """Any text gives a value within the bounds or a ValueError, without a warning."""
    try:
        value = evaluate_expression(text)
    except ValueError:
        return
    assert abs(value) <= MAX_MAGNITUDE
    assert value.denominator <= MAX_DENOMINATOR
