"""Pictures of a request in the decoder of layouts: their places in the tree, their positions, and their features."""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field
from numpy.typing import NDArray
from torch import Tensor

from turnwise.types import PlacedPicture
from turnwise_engine_support.picture_families import PictureArrays, family_of


@define(eq=False)
class RowPictures:
    """
    The pictures of a context.

    Attributes:
        places: of the pictures, in their order.
        arrays: of the pictures.
        rows: (n,) of the context's tokens, their rows in `features`; -1 for text.
        axes: (3, n) positions of the context's tokens in time, height and width; None if they have plain positions.
    """

    places: tuple[PlacedPicture, ...]
    arrays: tuple[PictureArrays, ...]
    rows: NDArray[np.int64]
    axes: NDArray[np.int64] | None
    _features: list[Tensor] = field(factory=list, init=False)

    def tree_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Return ids in which the placeholders of a picture have a negative number that only its bytes have."""
        ids = list(token_ids)
        for place in self.places:
            own = -1 - int(place.picture.key, 16)
            for index in range(place.start, place.stop):
                if self.rows[index] >= 0:
                    ids[index] = own
        return ids

    def positions(self, size: int) -> NDArray[np.int64]:
        """Return the (3, size) or (size,) positions of the context and of the tokens sampled so far."""
        if self.axes is None:
            return np.arange(size)
        sampled = int(self.axes.max()) + 1 + np.arange(size - self.axes.shape[1])
        return np.concatenate([self.axes, np.tile(sampled, (3, 1))], axis=1)

    def sources(self, queries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for (q,) tokens the (q,) rows of their features in `features`; -1 for text."""
        found = np.full(len(queries), -1, np.int64)
        known = queries < len(self.rows)
        found[known] = self.rows[queries[known]]
        return found

    def features(self, model: object) -> list[Tensor]:
        """Return (n, H) features of all pictures' placeholders: for the first layer, and for some further layers."""
        if not self._features:
            family = family_of(model)
            each = [family.encode(model, arrays) for arrays in self.arrays]
            self._features = [torch.cat(parts) for parts in zip(*each, strict=True)]
        return self._features

    def drop_features(self) -> None:
        """Forget the features: they are read in the prefill only, and depend on the weights."""
        self._features = []


def encoder_outputs(
    model: Any, rows: Sequence[tuple[RowPictures, NDArray[np.int64]] | None], width: int
) -> tuple[dict[str, Any], Tensor]:
    """
    Return the `mm_encoder_outputs` of a forward pass, and the (B, width) bool places of their features.

    Args:
        model: a vision-language model of transformers.
        rows: of each row its pictures, and the (q,) sources of its queries, which are right-aligned; None is text.
        width: queries of a row.
    """
    mask = torch.zeros(len(rows), width, dtype=torch.bool, device=model.device)
    parts: list[list[Tensor]] = []
    for number, row in enumerate(rows):
        if row is None:
            continue
        pictures, sources = row
        chosen = torch.from_numpy(sources[sources >= 0]).to(model.device)
        mask[number, width - len(sources) :] = torch.from_numpy(sources >= 0).to(model.device)
        parts.append([vectors[chosen] for vectors in pictures.features(model)])
    return {"image": family_of(model).encoder_output(list(zip(*parts, strict=True)))}, mask
