"""Draws scenes with pillow, without smoothing: the same scene has the same pixels."""

from __future__ import annotations

import io
from typing import Final

from PIL import Image, ImageDraw

from turnwise.media import Picture, find_picture
from turnwise_drawn_scenes.scenes import CELL, COLOURS, GRID, PATTERNS, SIZE, Scene, Shape

_MARGIN: Final = 3
_TILE: Final = 4
_MARK: Final = 8
"""Pixels on a side of the mark: two tiles. It starts at a multiple of a tile, so each tile becomes one pixel."""
_BLACK: Final = (0, 0, 0)
_WHITE: Final = (255, 255, 255)


def draw(scene: Scene) -> Image.Image:
    """Return the picture of a scene: (SIZE, SIZE) pixels in RGB."""
    image = Image.new("RGB", (SIZE, SIZE))
    pen = ImageDraw.Draw(image)
    for row in range(GRID):
        for column in range(GRID):
            left, top = CELL * column, CELL * row
            pen.rectangle((left, top, left + CELL - 1, top + CELL - 1), fill=floor_colour(column, row))
    for shape in scene.shapes:
        _draw_form(pen, shape)
        _draw_mark(image, shape)
    return image


def floor_colour(column: int, row: int) -> tuple[int, int, int]:
    """Return the dark colour of an empty cell, which tells a model that sees few pixels where the cell is."""
    return 30 * column, 30 * row, 45


def encode(image: Image.Image) -> Picture:
    """Return an image as a PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return find_picture(file.getvalue(), "image/png")


def _draw_form(pen: ImageDraw.ImageDraw, shape: Shape) -> None:
    left, top, right, bottom = shape.box
    corners = (left + _MARGIN, top + _MARGIN, right - 1 - _MARGIN, bottom - 1 - _MARGIN)
    colour = COLOURS[shape.colour]
    if shape.form == "circle":
        pen.ellipse(corners, fill=colour)
    elif shape.form == "square":
        pen.rectangle(corners, fill=colour)
    else:
        pen.polygon([(left + CELL // 2, corners[1]), (corners[2], corners[3]), (corners[0], corners[3])], fill=colour)


def _draw_mark(image: Image.Image, shape: Shape) -> None:
    tile = PATTERNS[shape.pattern]
    left, top = (start + (CELL - _MARK) // 2 for start in shape.box[:2])
    for y in range(_MARK):
        for x in range(_MARK):
            is_black = tile[y % _TILE][x % _TILE] == "X"
            image.putpixel((left + x, top + y), _BLACK if is_black else _WHITE)
