"""The columns of a trajectory as read-only views."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from turnwise.record.column_specs import ColumnSpec
from turnwise.record.columns import Origin, TokenRecord
from turnwise.record.pictures import Pictures
from turnwise.types import Array, FloatArray, TokenArray


class RecordViews(TokenRecord):
    """A record that starts with a prompt: T tokens, of which the last R are the response."""

    __slots__ = ("num_prompt_tokens",)

    num_prompt_tokens: int

    @property
    def num_response_tokens(self) -> int:
        """R: number of tokens after the prompt."""
        return len(self._columns) - self.num_prompt_tokens

    @property
    def input_ids(self) -> TokenArray:
        """(T,) int32, prompt and response."""
        return self._columns.view("token_ids")

    @property
    def prompt_ids(self) -> TokenArray:
        """(P,) int32."""
        return self.input_ids[: self.num_prompt_tokens]

    @property
    def response_ids(self) -> TokenArray:
        """(R,) int32."""
        return self._columns.view("token_ids", self.num_prompt_tokens)

    @property
    def pictures(self) -> Pictures:
        """The pictures of the record, with their places in `input_ids`."""
        return self._pictures

    @property
    def response_mask(self) -> NDArray[np.uint8]:
        """(R,) uint8: 1 exactly on actions: tokens that the policy sampled here, free of a grammar."""
        is_action: NDArray[np.bool_] = self.origins == int(Origin.ACTION)  # numpy is slow with the member
        is_action.flags.writeable = False
        return is_action.view(np.uint8)

    @property
    def origins(self) -> NDArray[np.uint8]:
        """(R,) uint8: the `Origin` of each response token."""
        return self._columns.view("origins", self.num_prompt_tokens)

    @property
    def logprobs(self) -> FloatArray:
        """(R,) float32: of each sampled, constrained or replayed id when it was sampled; 0.0 elsewhere."""
        return self._columns.view("logprobs", self.num_prompt_tokens)

    @property
    def weight_versions(self) -> TokenArray:
        """(R,) int32: version of the weights that sampled each id, constrained and replayed ones too; -1 elsewhere."""
        return self._columns.view("weight_versions", self.num_prompt_tokens)

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        """Declarations of the open columns that this record has, by name."""
        return dict(self._columns.open)

    def column(self, name: str) -> Array:
        """Return the values of an open column: (T, *shape) for one of all tokens, otherwise (R, *shape)."""
        first = self.num_prompt_tokens if self._columns.open[name].of_responses else 0
        return self._columns.view(name, first)

    @property
    def _first_response(self) -> int:
        return self.num_prompt_tokens

    def turns(self) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) absolute indices of the turns: unbroken runs of tokens sampled here, in one path."""
        turns: list[tuple[int, int]] = []
        place = (-1, -1)
        for segment in self._segments:
            if segment.origin.is_turn:
                before, place = place, (segment.block, segment.path)
                follows = turns and turns[-1][1] == segment.start and place == before
                turns.append((turns.pop()[0] if follows else segment.start, segment.stop))
        return tuple(turns)

    # The layout

    @property
    def position_ids(self) -> TokenArray:
        """(T,) int32: 1 + the largest position among the visible tokens before; 0 when there is none."""
        return self._columns.view("position_ids")

    @property
    def block_start(self) -> TokenArray:
        """(T,) int32: absolute index at which the token's block starts; 0 outside blocks."""
        return self._columns.view("block_start")

    @property
    def path_start(self) -> TokenArray:
        """(T,) int32: absolute index at which the token's own path starts; 0 outside blocks."""
        return self._columns.view("path_start")

    def visible(self, query: int, key: int) -> bool:
        """Return whether the token at absolute index `query` sees the one at `key`."""
        block_start, path_start = self.block_start[query], self.path_start[query]
        return bool(key <= query and (key < block_start or key >= path_start))
