"""The pictures that engine checks send, and the model's own scores of contexts that have some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from attrs import field, frozen

from turnwise.types import FloatArray, GenerateRequest, Picture, PlacedPicture, SamplingParams


class PictureReference(Protocol):
    """As `turnwise_testing.probes.engine.Reference`, for contexts with pictures; `VisionReference` is one."""

    def weights(self, *, variant: int) -> Iterable[tuple[str, Any]]:
        """Return the whole state dict, as `Engine.update_weights` takes it."""

    def scores(
        self,
        token_ids: Sequence[int],
        num_context: int,
        *,
        temperature: float,
        variant: int,
        pictures: Sequence[PlacedPicture] = (),
    ) -> tuple[FloatArray, FloatArray]:
        """Return the (n,) log-probabilities of the ids after the context, and of the best ids in their places."""


@frozen(kw_only=True, eq=False)
class PictureProbe:
    """
    Pictures for the checks of an engine.

    Attributes:
        pictures: at least two that have equally many placeholders, first, and others.
        num_tokens: placeholders of each picture.
        placeholder: its id.
        reference: the model's own scores.
    """

    pictures: tuple[Picture, ...]
    num_tokens: tuple[int, ...] = field()
    placeholder: int
    reference: PictureReference

    @num_tokens.validator
    def _check(self, _attribute: object, num_tokens: tuple[int, ...]) -> None:
        if len(num_tokens) != len(self.pictures) or len(num_tokens) < 2 or num_tokens[0] != num_tokens[1]:
            raise ValueError(f"expected pictures of which the first two have equally many tokens, got {num_tokens}")

    def request(
        self, request_id: str, parts: Sequence[Sequence[int] | int], sampling: SamplingParams
    ) -> GenerateRequest:
        """
        Return a request that is its own trajectory.

        Args:
            request_id: its id.
            parts: of its context: ids, or the number of a picture.
            sampling: its parameters.
        """
        ids: list[int] = []
        places = []
        for part in parts:
            if isinstance(part, int):
                places.append(
                    PlacedPicture(start=len(ids), num_tokens=self.num_tokens[part], picture=self.pictures[part])
                )
                ids += [self.placeholder] * self.num_tokens[part]
            else:
                ids += part
        return GenerateRequest(
            request_id=request_id,
            trajectory_id=request_id,
            token_ids=np.array(ids, np.int32),
            sampling=sampling,
            pictures=tuple(places),
        )
