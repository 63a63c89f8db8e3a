"""
Demonstrations for training: a solver that knows the method but slips at given rates.

A model that imitates a noisy solver has about the solver's accuracy when sampled at temperature 1. The correct choice
stays the most likely one at every decision, so reinforcement learning only has to sharpen the model's choices. A slip
never depends on the question, and the solver continues with the result of a slip.
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
    Probabilities of the solver's slips, each below 0.5 so that the correct choice stays the most likely one.

    Attributes:
        digit: replace a digit of a number; drawn for each number copied into a call or the answer.
        order: compute from left to right and ignore precedence and parentheses; drawn for each task.
        early: answer with an intermediate result; drawn after each step but the last.
        rushed: first call the calculator with the whole expression, which it rejects; drawn for each longer task.
    """

    digit: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])
    order: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])
    early: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])
    rushed: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])


CLEAN: Final = SlipRates()
"""No slips: the rates of the first phase of the training."""


@frozen
class Turn:
    """
    An assistant turn and the tool's response.

    Attributes:
        text: the assistant's text, without the end-of-turn token.
        response: the tool's message; None if the turn ended the episode.
    """

    text: str
    response: str | None


class NoisySolver:
    """
    Solves problems with the calculator and slips at given rates.

    Args:
        rates: Probabilities of the slips.
        source: Random generator of the slips.
    """

    def __init__(self, rates: SlipRates, source: random.Random) -> None:
        self._rates = rates
        self._source = source

    def solve(self, problem: Problem) -> list[Turn]:
        """Return the turns of one demonstration: calls with their responses, then the answer."""
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
        """Return the rejected call of the whole expression, or no turn without this slip."""
        has_one_step = isinstance(expression.left, int) and isinstance(expression.right, int)
        if has_one_step or not self._slips(self._rates.rushed):
            return []
        return [Turn(call_text(render(expression)), respond(render(expression)))]

    def _plan(self, expression: Operation) -> Operand:
        """Return the expression as the solver reads it."""
        return left_to_right(expression) if self._slips(self._rates.order) else expression

    def _call(self, operation: Operation) -> Turn:
        """Return a call of the calculator, possibly with miscopied numbers."""
        assert isinstance(operation.left, int)
        assert isinstance(operation.right, int)
        left, right = self._copy(operation.left), self._copy(operation.right)
        expression = f"{left} {operation.symbol} {right}"
        return Turn(call_text(expression), respond(expression))

    def _copy(self, number: int) -> int:
        """Return the number, possibly with one digit replaced; its length and sign stay the same."""
        if not self._slips(self._rates.digit):
            return number
        digits = list(str(abs(number)))
        position = self._source.randrange(len(digits))
        lowest = 1 if position == 0 else 0
        digits[position] = self._source.choice([d for d in "0123456789"[lowest:] if d != digits[position]])
        return int("".join(digits)) * (-1 if number < 0 else 1)

    def _slips(self, rate: float) -> bool:
        return self._source.random() < rate
