"""
The tool: a pocket calculator that computes one operation per call.

A language model writes the expression, so it is untrusted. The evaluator accepts only listed characters and syntax
nodes, and checks the bounds of every number before it computes with it. Arithmetic is exact (fractions): `0.1 + 0.2`
is `0.3`.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

MAX_LENGTH: Final = 100
"""Longest expression in characters; also limits the nesting depth."""

MAX_OPERATIONS: Final = 1
"""Binary operations allowed in one call; the limit of 1 makes `(23 + 48) * 7` a task of two turns."""

MAX_MAGNITUDE: Final = 10**15
"""Largest absolute value of any literal, intermediate value or result."""

MAX_DENOMINATOR: Final = 10**15
"""Largest denominator of any value; without it repeated division would grow a fraction without limit."""

MAX_EXPONENT: Final = 50
"""Largest absolute exponent. A power then has at most 50 times the digits of its base, so computing it is cheap."""

_ALLOWED_TEXT: Final = re.compile(r"[0-9.+\-*/%() ]+")
_BINARY: Final[Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """
    Computes one arithmetic operation, for example "23 + 48".

    Args:
        expression: Two numbers and one of + - * / // % ** between them.

    Returns:
        The result: an integer where it is one, otherwise a decimal number of at most 10 digits.

    Raises:
        ValueError: The expression is not allowed or has no value; the message says what is wrong with it.
    """
    return format_number(evaluate_expression(expression, max_operations=MAX_OPERATIONS))


def evaluate_expression(expression: str, *, max_operations: int | None = None) -> Fraction:
    """
    Return the exact value of an arithmetic expression as a fraction in lowest terms.

    Args:
        expression: Decimal numbers, `+ - * / // % **`, signs, parentheses and spaces; at most `MAX_LENGTH` characters.
        max_operations: Limit of binary operations; None: no limit.

    Raises:
        ValueError: The expression is not of this form, divides by zero, or has a number out of bounds.
    """
    tree = _parse(expression)
    num_operations = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
    if max_operations is not None and num_operations > max_operations:
        allowed = "one operation" if max_operations == 1 else f"{max_operations} operations"
        raise ValueError(f"only {allowed} per call")
    return _evaluate(tree)


def format_number(value: Fraction) -> str:
    """
    Return a value as text: an integer exactly, any other value rounded to 10 significant digits.

    Examples: `71`, `-3`, `3.5`, `0.3333333333`.
    """
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10g}"


def _parse(expression: str) -> ast.expr:
    """Parse an expression; check length and characters before Python's parser reads the text."""
    text = expression.strip(" \n")
    if not text:
        raise ValueError("the expression is empty")
    if len(text) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    if not _ALLOWED_TEXT.fullmatch(text):
        raise ValueError("only numbers, + - * / // % **, parentheses and spaces are allowed")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("not a valid expression") from error


def _evaluate(node: ast.expr) -> Fraction:
    """Return the value of a node, within the bounds."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return _check_bounds(_parse_literal(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand)
        case ast.BinOp(left=left, op=symbol, right=right):
            return _check_bounds(_apply(symbol, _evaluate(left), _evaluate(right)))
        case _:
            raise ValueError("only numbers and + - * / // % ** are allowed")


def _parse_literal(number: int | float) -> Fraction:
    """Return the decimal number in the source text rather than the nearest binary float."""
    if abs(number) > MAX_MAGNITUDE:
        raise ValueError(f"a number is larger than {MAX_MAGNITUDE}")
    return Fraction(number if isinstance(number, int) else repr(number))


def _apply(symbol: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(symbol, ast.Pow):
        return _power(left, right)
    operation = _BINARY.get(type(symbol))
    if operation is None:
        raise ValueError("only + - * / // % ** are allowed")
    try:
        return operation(left, right)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    # Every check comes before the power is computed: a large exponent would take unbounded time and memory.
    if exponent.denominator != 1:
        raise ValueError("an exponent must be a whole number")
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"an exponent is larger than {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    return Fraction(base**exponent.numerator)


def _check_bounds(value: Fraction) -> Fraction:
    if abs(value) > MAX_MAGNITUDE:
        raise ValueError(f"a number is larger than {MAX_MAGNITUDE}")
    if value.denominator > MAX_DENOMINATOR:
        raise ValueError(f"a number is closer to zero or finer than 1/{MAX_DENOMINATOR}")
    return value
