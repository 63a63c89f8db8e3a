"""The environment `guess_number`: a small game, for tests and first steps."""

from __future__ import annotations

import random
import re

from turnwise import Task
from turnwise_environments.protocol import Action, Observation


class GuessNumber:
    """
    Find a number by guessing; each answer says whether it is higher or lower.

    The reward is 1.0 for the number, and 0.0 for any other turn.

    Args:
        highest: the number is in 1..highest.
        max_guesses: guesses after which the game is over.
    """

    repeatable = True

    def __init__(self, highest: int = 10, max_guesses: int = 5) -> None:
        if highest < 1 or max_guesses < 1:
            raise ValueError("highest and max_guesses must be at least 1")
        self._highest, self._max_guesses = highest, max_guesses
        self._number = self._num_guesses = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Choose a number."""
        self._number, self._num_guesses = random.Random(seed).randint(1, self._highest), 0
        return Observation(text=f"Guess my number from 1 to {self._highest}.")

    def step(self, action: Action) -> Observation:
        """Compare the first number of a turn."""
        self._num_guesses += 1
        found = re.search(r"\d{1,9}", action) if isinstance(action, str) else None
        guess = int(found[0]) if found else None
        if guess == self._number:
            return Observation(text="Right.", reward=1.0, done=True)
        if self._num_guesses >= self._max_guesses:
            return Observation(text=f"It was {self._number}.", truncated=True)
        if guess is None:
            return Observation(text="Write a number.")
        return Observation(text="Higher." if guess < self._number else "Lower.")

    def close(self) -> None:
        """Free nothing."""
