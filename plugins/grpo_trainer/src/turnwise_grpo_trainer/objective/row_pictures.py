"""The pictures of rows, whose arrays are read when a forward pass needs them."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen
from torch import Tensor

from turnwise.types import PlacedPicture
from turnwise_engine_support.pictures import PictureReader

Pictures = Sequence[Sequence[PlacedPicture]]
"""The pictures of each row, by its own tokens without pads, in their order; rows of text have none."""


@frozen(eq=False)
class PictureRows:
    """
    The pictures of some rows. Arrays are read when a micro-batch is made: all of a batch would fill the memory.

    Attributes:
        places: of each row's pictures, by its own tokens.
        num_patches: of each row's pictures together, which the vision tower computes.
        reader: of the model.
    """

    places: tuple[tuple[PlacedPicture, ...], ...]
    num_patches: tuple[int, ...]
    reader: PictureReader

    def select(self, rows: Sequence[int]) -> PictureRows:
        """Return the pictures of some rows, in the given order."""
        places = tuple(self.places[row] for row in rows)
        return evolve(self, places=places, num_patches=tuple(self.num_patches[row] for row in rows))

    def inputs(self) -> dict[str, Tensor]:
        """Return the model's arguments for the pictures of all rows in order; none without pictures."""
        found = [self.reader.arrays(place.picture) for row in self.places for place in row]
        return self.reader.family.collate(found) if found else {}
