"""
What the model is trained to imitate: a solver that knows the method and slips at known rates.

A model that imitates a noisy solver, sampled at temperature 1, is right about as often as the solver is. At every
decision the right choice stays the likeliest, so what reinforcement learning has to do is to sharpen choices that
the model already has. A slip never depends on the question, and after one the solver goes on with what it got.
"""

import random
from typing import Final

from attrs import field, frozen
from attrs.validators import ge, lt

from turnwise_calculator_demo.episodes import answer_text, call_text, respond
from turnwise_calculator_demo.expressions import (
    Operand,
    Operation,
    left_to_right,
    next_operation,
    render,
    substitute,
)
from turnwise_calculator_demo.tasks import Problem


@frozen
class SlipRates:
    """
    How often the solver slips, each a probability below one half so that the right choice stays the likeliest.

    Attributes:
        digit: of each number that it copies, into a call or into the answer: one of its digits is replaced.
        order: of each task: it works from left to right, whatever the precedence and the parentheses.
        early: after each step but the last: it gives the result so far as its answer.
        rushed: of each task of several steps: it first gives the calculator the whole expression, which is refused.
    """

    digit: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])
    order: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])
    early: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])
    rushed: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])


CLEAN: Final = SlipRates()
"""No slips: what the first part of the training imitates."""


@frozen
class Turn:
    """
    An assistant turn and what answered it.

    Attributes:
        text: what the assistant wrote, without the end-of-turn token.
        response: the tool's message; None where the turn ended the episode.
    """

    text: str
    response: str | None


class NoisySolver:
    """
    Solves problems with the calculator, slipping at given rates.

    Args:
        rates: How often it slips.
        source: Where its slips are drawn from.
    """

    def __init__(self, rates: SlipRates, source: random.Random) -> None:
        self._rates = rates
        self._source = source

    def solve(self, problem: Problem) -> list[Turn]:
        """
        One demonstration.

        Args:
            problem: The problem to solve.

        Returns:
            The turns: calls with their responses, then an answer.
        """
        turns = self._rushed_turns(problem.expression)
        rest: Operand = self._plan(problem.expression)
        while (operation := next_operation(rest)) is not None:
            turns.append(self._call(operation))
            result = int(turns[-1].response or "")
            rest = substitute(rest, operation, result)
            if not isinstance(rest, int) and self._slips(self._rates.early):
                rest = result
        assert isinstance(rest, int)
        return [*turns, Turn(answer_text(self._copy(rest)), None)]

    def _rushed_turns(self, expression: Operation) -> list[Turn]:
        """The refused call of the whole expression, where the solver is in a hurry."""
        has_one_step = isinstance(expression.left, int) and isinstance(expression.right, int)
        if has_one_step or not self._slips(self._rates.rushed):
            return []
        return [Turn(call_text(render(expression)), respond(render(expression)))]

    def _plan(self, expression: Operation) -> Operand:
        """The expression as the solver understands it."""
        return left_to_right(expression) if self._slips(self._rates.order) else expression

    def _call(self, operation: Operation) -> Turn:
        """One call of the calculator, its numbers perhaps miscopied."""
        assert isinstance(operation.left, int)
        assert isinstance(operation.right, int)
        left, right = self._copy(operation.left), self._copy(operation.right)
        expression = f"{left} {operation.symbol} {right}"
        return Turn(call_text(expression), respond(expression))

    def _copy(self, number: int) -> int:
        """The number, perhaps with one digit replaced; its length and sign stay."""
        if not self._slips(self._rates.digit):
            return number
        digits = list(str(abs(number)))
        position = self._source.randrange(len(digits))
        lowest = 1 if position == 0 else 0
        digits[position] = self._source.choice([d for d in "0123456789"[lowest:] if d != digits[position]])
        return int("".join(digits)) * (-1 if number < 0 else 1)

    def _slips(self, rate: float) -> bool:
        """Whether a slip of this rate happens now."""
        return self._source.random() < rate
