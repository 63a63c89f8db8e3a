"""
Scenes: a few coloured shapes on a grid, and a question about the pattern on one of them.

A pattern is a tile of 4 x 4 pixels, half black and half white. So a picture that is scaled down by four has the same
grey in the place of each pattern, and only a part of the picture at its full size shows which one it is.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Final, Literal, get_args

from attrs import evolve, frozen

Split = Literal["train", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)
GRID: Final = 4
"""Cells on a side of the picture."""
CELL: Final = 32
"""Pixels on a side of a cell."""
SIZE: Final = GRID * CELL
"""Pixels on a side of the picture."""
NUM_SHAPES: Final = 4

COLOURS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (230, 30, 40),
    "green": (40, 190, 60),
    "blue": (50, 90, 240),
    "yellow": (245, 220, 40),
    "purple": (190, 60, 220),
    "cyan": (50, 220, 230),
}
FORMS: Final = ("circle", "square", "triangle")
PATTERNS: Final[Mapping[str, tuple[str, str, str, str]]] = {
    "rows": ("XXXX", "XXXX", "....", "...."),
    "columns": ("XX..", "XX..", "XX..", "XX.."),
    "checks": ("XX..", "XX..", "..XX", "..XX"),
    "rings": (".XX.", "X..X", "X..X", ".XX."),
    "crosses": ("X..X", ".XX.", ".XX.", "X..X"),
    "dots": ("X.X.", ".X.X", "X.X.", ".X.X"),
}
"""Tiles of black (`X`) and white pixels, by their names: the answers."""
_HELD_OUT: Final = 8
"""One of so many scenes is in the split `test`."""


@frozen
class Shape:
    """
    A shape of a scene.

    Attributes:
        column: of its cell, from 0 at the left.
        row: of its cell, from 0 at the top.
        colour: a name in `COLOURS`.
        form: a name in `FORMS`.
        pattern: a name in `PATTERNS`: of the mark in its middle.
    """

    column: int
    row: int
    colour: str
    form: str
    pattern: str

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of its cell in pixels."""
        left, top = CELL * self.column, CELL * self.row
        return left, top, left + CELL, top + CELL


@frozen
class Scene:
    """
    A scene with its question.

    Attributes:
        shapes: with different cells and colours.
        asked: index of the shape that the question is about.
        has_place: whether the question names its row and column, or a model has to find it.
    """

    shapes: tuple[Shape, ...]
    asked: int
    has_place: bool = True

    @property
    def target(self) -> Shape:
        """The shape that the question is about."""
        return self.shapes[self.asked]

    @property
    def question(self) -> str:
        """The text of the question, which names colour and form, and the place, counted from 1 at the top left."""
        place = f" in row {self.target.row + 1}, column {self.target.column + 1}" if self.has_place else ""
        return f"Which pattern is on the {self.asked_name}{place}?"

    @property
    def answer(self) -> str:
        """The pattern's name."""
        return self.target.pattern

    @property
    def split(self) -> Split:
        """The split that its text decides: no scene is in both."""
        digest = hashlib.sha256(repr((sorted(map(repr, self.shapes)), self.asked_name)).encode()).digest()
        return "test" if digest[0] % _HELD_OUT == 0 else "train"

    @property
    def asked_name(self) -> str:
        """Colour and form of the asked shape."""
        return f"{self.target.colour} {self.target.form}"


def generate_scenes(split: Split, seed: int, *, has_place: bool = True) -> Iterator[Scene]:
    """
    Yield an endless stream of scenes, reproducible by seed.

    Args:
        split: `train` or `test`.
        seed: any integer; streams of different splits share no scene.
        has_place: of the scenes, which are the same otherwise.
    """
    source = random.Random(f"{split}-{seed}")
    while True:
        scene = evolve(draw_scene(source), has_place=has_place)
        if scene.split == split:
            yield scene


def draw_scene(source: random.Random) -> Scene:
    """Return a random scene of any split."""
    cells = source.sample(range(GRID * GRID), NUM_SHAPES)
    colours = source.sample(list(COLOURS), NUM_SHAPES)
    shapes = tuple(
        Shape(cell % GRID, cell // GRID, colour, source.choice(FORMS), source.choice(list(PATTERNS)))
        for cell, colour in zip(cells, colours, strict=True)
    )
    return Scene(shapes, source.randrange(NUM_SHAPES))
