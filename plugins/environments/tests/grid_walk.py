"""An environment that draws its state: a walker on a grid, for tests."""

import io
import random
import re

from PIL import Image

from turnwise.media import read_picture
from turnwise_environments import Observation

MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
CELL = 8
FLOOR, WALKER, GOAL = (20, 20, 60), (230, 30, 40), (40, 190, 60)


class GridWalk:
    """The model sees the grid alone, and names a direction; the reward is 1.0 at the goal, which ends it."""

    repeatable = True

    def __init__(self, size=3, max_steps=8):
        self._size, self._max_steps = size, max_steps
        self._walker = self._goal = (0, 0)
        self._num_steps = 0

    def reset(self, task, seed):
        """Choose two cells."""
        cells = [(x, y) for x in range(self._size) for y in range(self._size)]
        self._walker, self._goal = random.Random(seed).sample(cells, 2)
        self._num_steps = 0
        return Observation(text=f"Walk to the green cell: {', '.join(MOVES)}.", pictures=(self.draw(),))

    def step(self, action):
        """Walk in the last direction of a turn; a wall stops the walker."""
        self._num_steps += 1
        found = re.findall("|".join(MOVES), action) if isinstance(action, str) else []
        if found:
            self._walker = tuple(
                min(max(at + by, 0), self._size - 1) for at, by in zip(self._walker, MOVES[found[-1]], strict=True)
            )
        if self._walker == self._goal:
            return Observation(reward=1.0, done=True)
        if self._num_steps >= self._max_steps:
            return Observation(truncated=True)
        return Observation(text="" if found else "Name a direction.", pictures=(self.draw(),))

    def close(self):
        """Free nothing."""

    def draw(self):
        """Return the grid as a PNG of 8 x 8 pixels for each cell."""
        image = Image.new("RGB", (self._size, self._size), FLOOR)
        image.putpixel(self._goal, GOAL)
        image.putpixel(self._walker, WALKER)
        file = io.BytesIO()
        image.resize((CELL * self._size, CELL * self._size), Image.Resampling.NEAREST).save(file, "PNG")
        return read_picture(file.getvalue())
