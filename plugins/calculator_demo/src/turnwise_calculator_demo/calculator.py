"""
The tool: a pocket calculator that takes one operation a call.

The text it evaluates is written by a language model, so nothing of it is trusted: an allow-list of characters, then
an allow-list of syntax nodes, and a bound on every number before it is computed. Arithmetic is exact (fractions), so
`0.1 + 0.2` is `0.3`.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

MAX_LENGTH: Final = 100
"""Longest expression in characters; it also bounds how deep an expression can nest."""

MAX_OPERATIONS: Final = 1
"""Binary operations one call of the tool may hold: what makes `(23 + 48) * 7` a task of two turns."""

MAX_MAGNITUDE: Final = 10**15
"""Largest absolute value of any literal, intermediate value or result."""

MAX_DENOMINATOR: Final = 10**15
"""Largest denominator of any value, so that repeated division cannot grow a fraction without end."""

MAX_EXPONENT: Final = 50
"""Largest absolute exponent: a power is at most 50 times as long as its base, so it is safe to compute and check."""

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
    The exact value of an arithmetic expression.

    Args:
        expression: Decimal numbers, `+ - * / // % **`, signs, parentheses and spaces; at most `MAX_LENGTH` characters.
        max_operations: Most binary operations it may hold; None leaves the length as the only limit.

    Returns:
        The value as a fraction in lowest terms.

    Raises:
        ValueError: Anything else than such an expression, a division by zero, or a number out of bounds.
    """
    tree = _parse(expression)
    num_operations = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
    if max_operations is not None and num_operations > max_operations:
        allowed = "one operation" if max_operations == 1 else f"{max_operations} operations"
        raise ValueError(f"only {allowed} per call")
    return _value(tree)


def format_number(value: Fraction) -> str:
    """
    Writes a value: `71`, `-3`, `3.5`, `0.3333333333`.

    Args:
        value: Any fraction within the bounds of this module.

    Returns:
        An integer exactly, anything else rounded to 10 significant digits.
    """
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10g}"


def _parse(expression: str) -> ast.expr:
    """Checks length and characters before Python's parser sees the text."""
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


def _value(node: ast.expr) -> Fraction:
    """Evaluates one node; every value that leaves here is within the bounds."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(_literal(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=symbol, right=right):
            return _bounded(_apply(symbol, _value(left), _value(right)))
        case _:
            raise ValueError("only numbers and + - * / // % ** are allowed")


def _literal(number: int | float) -> Fraction:
    """The decimal number that was written, not the binary float nearest to it."""
    if abs(number) > MAX_MAGNITUDE:
        raise ValueError(f"a number is larger than {MAX_MAGNITUDE}")
    return Fraction(number if isinstance(number, int) else repr(number))


def _apply(symbol: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    """Applies one binary operator to two bounded values."""
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
    """Raises to a small whole power; its size is bounded before it is computed."""
    if exponent.denominator != 1:
        raise ValueError("an exponent must be a whole number")
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"an exponent is larger than {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    """Returns the value where it is within the bounds."""
    if abs(value) > MAX_MAGNITUDE:
        raise ValueError(f"a number is larger than {MAX_MAGNITUDE}")
    if value.denominator > MAX_DENOMINATOR:
        raise ValueError(f"a number is closer to zero or finer than 1/{MAX_DENOMINATOR}")
    return value
