r"""
Solves problems with programs and makes slips at known rates, for the model to imitate.

A model that imitates a noisy solver, sampled at temperature 1, is right about as often as the solver. The right choice
still has the highest probability at every decision, so rewards can improve the model.
"""

from __future__ import annotations

import random
from typing import Final

from attrs import field, frozen, validators

from turnwise_torl_python.demo.problems import Problem

_rate = field(default=0.0, validator=[validators.ge(0.0), validators.lt(0.5)])


@frozen
class SlipRates:
    """
    Probabilities of slips; each is below one half, so the right choice has the highest probability.

    Attributes:
        digit: a copied number has one digit replaced.
        typo: a program has a misspelt function, so it fails and the solver writes it again.
        give_up: the solver guesses after a program has failed.
        mental: the solver answers a problem without a program.
    """

    digit: float = _rate
    typo: float = _rate
    give_up: float = _rate
    mental: float = _rate


CLEAN: Final = SlipRates()
SHIPPED_SLIPS: Final = SlipRates(digit=0.06, typo=0.12, give_up=0.35, mental=0.12)
"""The rates of the shipped model."""

MISSPELT: Final = "pint"
_ERROR: Final = f"NameError: name '{MISSPELT}' is not defined"


@frozen
class Turn:
    """Text of the solver, and the output of its program; None in the last turn."""

    text: str
    output: str | None


class NoisySolver:
    """
    Solves problems with programs, with slips.

    Args:
        rates: probabilities of slips.
        source: random numbers for the slips.
    """

    def __init__(self, rates: SlipRates, source: random.Random) -> None:
        self._rates = rates
        self._source = source

    def solve(self, problem: Problem) -> list[Turn]:
        """Return a demonstration: programs with their outputs, and an answer."""
        if self._slips(self._rates.mental):
            return [self._answer(self._guess(problem))]
        turns: list[Turn] = []
        left = str(problem.steps[0].left)
        for step in problem.steps:
            program = f"{self._copy(left)} {step.symbol} {self._copy(str(step.right))}"
            if self._slips(self._rates.typo):
                turns.append(
                    _call(MISSPELT, program, self._source.choice((_ERROR, f"{_ERROR}. Did you mean: 'print'?")))
                )
                if self._slips(self._rates.give_up):
                    return [*turns, self._answer(self._guess(problem))]
            left = str(_evaluate(program))
            turns.append(_call("print", program, left))
        return [*turns, self._answer(self._copy(left))]

    def _answer(self, number: str) -> Turn:
        return Turn(f"The answer is \\boxed{{{number}}}.", None)

    def _guess(self, problem: Problem) -> str:
        digits = len(str(problem.answer))
        return str(self._source.randrange(10 ** (digits - 1), 10**digits))

    def _copy(self, number: str) -> str:
        if not self._slips(self._rates.digit):
            return number
        place = self._source.randrange(len(number.lstrip("-"))) + number.startswith("-")
        return number[:place] + self._source.choice("123456789") + number[place + 1 :]

    def _slips(self, rate: float) -> bool:
        return self._source.random() < rate


def _call(function: str, program: str, output: str) -> Turn:
    return Turn(f"```python\n{function}({program})\n```\n```output", output)


def _evaluate(program: str) -> int:
    left, symbol, right = program.split(" ")
    if symbol == "*":
        return int(left) * int(right)
    return int(left) + int(right) if symbol == "+" else int(left) - int(right)
