"""Arithmetic expressions as trees, and the single-operation steps that evaluate them."""

from collections.abc import Iterator
from typing import Final

from attrs import frozen

_PRECEDENCE: Final = {"+": 1, "-": 1, "*": 2}


@frozen
class Operation:
    """A binary operation; each operand is a number or an operation."""

    left: "Operand"
    symbol: str
    right: "Operand"


Operand = int | Operation


@frozen
class Step:
    """One call of the calculator: `left symbol right` with both numbers known, and its result."""

    left: int
    symbol: str
    right: int
    result: int

    @property
    def expression(self) -> str:
        """The call's argument, for example `23 + 48`."""
        return f"{self.left} {self.symbol} {self.right}"


def render(operand: Operand) -> str:
    """Return an expression as text with the necessary parentheses, for example `(23 + 48) * 7`."""
    if isinstance(operand, int):
        return str(operand)
    left = _render_inside(operand.left, _PRECEDENCE[operand.symbol])
    right = _render_inside(operand.right, _PRECEDENCE[operand.symbol] + 1)
    return f"{left} {operand.symbol} {right}"


def next_operation(operand: Operand) -> Operation | None:
    """Return the leftmost operation whose operands are both numbers; None for a number."""
    if isinstance(operand, int):
        return None
    return next_operation(operand.left) or next_operation(operand.right) or operand


def substitute(operand: Operand, done: Operation, result: int) -> Operand:
    """Return the expression with one operation replaced by its result."""
    if operand is done:
        return result
    if isinstance(operand, int):
        return operand
    left, right = (substitute(side, done, result) for side in (operand.left, operand.right))
    return Operation(left, operand.symbol, right)


def left_to_right(operand: Operand) -> Operand:
    """Return the same numbers and symbols evaluated from left to right, without parentheses and precedence."""
    numbers, symbols = list(_numbers(operand)), list(_symbols(operand))
    flat: Operand = numbers[0]
    for symbol, number in zip(symbols, numbers[1:], strict=True):
        flat = Operation(flat, symbol, number)
    return flat


def apply_symbol(left: int, symbol: str, right: int) -> int:
    """
    Compute `left symbol right`.

    Raises:
        ValueError: The symbol is not `+`, `-` or `*`.
    """
    match symbol:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    raise ValueError(f"unknown symbol {symbol!r}: expected +, - or *")


def solve(operand: Operand) -> tuple[Step, ...]:
    """
    Return the steps that evaluate an expression, in the order of the calls.

    There is one step per operation; the last step's result is the value. A number has no steps.
    """
    steps: list[Step] = []
    while (operation := next_operation(operand)) is not None:
        left, right = operation.left, operation.right
        assert isinstance(left, int)
        assert isinstance(right, int)
        steps.append(Step(left, operation.symbol, right, apply_symbol(left, operation.symbol, right)))
        operand = substitute(operand, operation, steps[-1].result)
    return tuple(steps)


def signature(operand: Operand) -> str:
    """Return the sorted numbers and symbols: equal for expressions that differ only in order or parentheses."""
    return " ".join([*map(str, sorted(_numbers(operand))), *sorted(_symbols(operand))])


def _render_inside(operand: Operand, least: int) -> str:
    """Return an operand as text, in parentheses if its precedence is below `least`."""
    text = render(operand)
    needs_parentheses = isinstance(operand, Operation) and _PRECEDENCE[operand.symbol] < least
    return f"({text})" if needs_parentheses else text


def _numbers(operand: Operand) -> Iterator[int]:
    if isinstance(operand, int):
        yield operand
    else:
        yield from _numbers(operand.left)
        yield from _numbers(operand.right)


def _symbols(operand: Operand) -> Iterator[str]:
    if isinstance(operand, Operation):
        yield from _symbols(operand.left)
        yield operand.symbol
        yield from _symbols(operand.right)
