"""The column `routed_experts`, and its shape by the `config.json` of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike, NDArray

from turnwise import ColumnSpec
from turnwise.errors import EngineError

COLUMN: Final = "routed_experts"
UNKNOWN: Final = -1
"""The route of a token that no engine has reported, and of layers without experts."""

_TOP_K: Final = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

Routes = NDArray[np.int16]


@frozen
class RouteShape:
    """
    The sizes of a model's routes.

    Attributes:
        num_layers: all layers of the model; those without experts have no routes.
        top_k: experts of a token in a layer.
        num_experts: from which they are chosen.
    """

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def column(self) -> ColumnSpec:
        """The declaration of `routed_experts`, (num_layers, top_k) for each token."""
        return ColumnSpec(name=COLUMN, dtype="int16", shape=(self.num_layers, self.top_k), fill=UNKNOWN, tokens="all")

    def unknown(self, num_tokens: int) -> Routes:
        """Return (num_tokens, num_layers, top_k) routes of tokens without any."""
        return np.full((num_tokens, self.num_layers, self.top_k), UNKNOWN, np.int16)

    def pad(self, given: ArrayLike, num_tokens: int, engine: str) -> Routes:
        """
        Return the routes that a server gave for its first tokens as those of all tokens.

        Args:
            given: (n, num_layers, top_k), of the tokens that it has run, without the last sampled one; or nothing.
            num_tokens: of context and output.
            engine: names the server in errors.

        Raises:
            EngineError: they have another shape, or an expert that the model does not have.
        """
        values, expected = np.asarray(given), (self.num_layers, self.top_k)
        if not values.size:
            return self.unknown(num_tokens)
        if values.ndim != 3 or values.shape[1:] != expected or len(values) > num_tokens:
            raise EngineError(
                f"{engine} returned routed experts of shape {values.shape} for {num_tokens} tokens; expected at most"
                f" {num_tokens} times {expected}"
            )
        if values.size and not UNKNOWN <= int(values.min()) <= int(values.max()) < self.num_experts:
            raise EngineError(f"{engine} returned the expert {int(values.max())} of {self.num_experts}")
        whole = self.unknown(num_tokens)
        whole[: len(values)] = values
        return whole


def read_shape(path: Path | None) -> RouteShape | None:
    """Return the sizes by the `config.json` in a model directory; None for a model without experts, or no file."""
    try:
        config = json.loads(((path or Path()) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return find_shape(config) if isinstance(config, dict) else None


def find_shape(config: Mapping[str, object]) -> RouteShape | None:
    """Return the sizes by the values of a `config.json`; None for a model without experts."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    found = [_first(text, names) for names in (("num_hidden_layers",), _TOP_K, _EXPERTS)]
    return None if None in found else RouteShape(*(int(each or 0) for each in found))


def _first(config: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    """Return the first of some values that is a number above 0."""
    values = (config.get(name) for name in names)
    return next((each for each in values if isinstance(each, int) and each > 0), None)
