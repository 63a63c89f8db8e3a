"""
Demonstrations for training: a solver that knows how to crop and to read a pattern, but often does neither.

Each slip has its rate. A solver that answers at once can only guess, and it guesses more often than not. So greedy
decoding of a model that imitates it is poor as well, and reinforcement learning has to find that looking pays.
"""

from __future__ import annotations

import json
import random
from typing import Final

from attrs import field, frozen
from attrs.validators import ge, le

from turnwise_drawn_scenes.scenes import PATTERNS, Scene, Shape

_RATE: Final = [ge(0.0), le(1.0)]


@frozen
class SlipRates:
    """
    Probabilities of the solver's slips.

    Attributes:
        at_once: answer without a look, by a guess; drawn for each scene.
        elsewhere: look at another shape, and answer with its pattern; drawn for each look.
        misread: answer with a random pattern after a look.
    """

    at_once: float = field(default=0.0, validator=_RATE)
    elsewhere: float = field(default=0.0, validator=_RATE)
    misread: float = field(default=0.0, validator=_RATE)


@frozen
class Solution:
    """
    The turns of a solver.

    Attributes:
        seen: the shape whose cell is cropped in the first turn; None if there is no such turn.
        answer: text of the last turn.
    """

    seen: Shape | None
    answer: str


def solve(scene: Scene, rates: SlipRates, source: random.Random) -> Solution:
    """Return the turns for a scene, with slips drawn from a random generator."""
    guess = source.choice([*PATTERNS])
    if source.random() < rates.at_once:
        return Solution(None, answer_text(guess))
    others = [shape for shape in scene.shapes if shape is not scene.target]
    seen = source.choice(others) if source.random() < rates.elsewhere else scene.target
    misreads = source.random() < rates.misread
    return Solution(seen, answer_text(guess if misreads else seen.pattern))


def answer_text(pattern: str) -> str:
    """Return the assistant turn that ends an episode."""
    return f"It has {pattern}."


def call_text(shape: Shape) -> str:
    """Return an assistant turn that crops the cell of a shape, in Hermes format."""
    arguments = dict(zip(("left", "top", "right", "bottom"), shape.box, strict=True))
    return f"<tool_call>\n{json.dumps({'name': 'crop', 'arguments': arguments})}\n</tool_call>"
