"""The weights that decoders read, and the version that they give to the tokens that they sample."""

from __future__ import annotations

from attrs import define


@define(eq=False)
class ServedWeights:
    """
    The weights in the model's memory.

    They change only while every decoder is paused. So the version that a decoder reads here during a step, on any
    thread, belongs to the tokens of this step. No other object keeps the number.

    Attributes:
        version: of the last update.
        torn: reason why the memory has the weights of no version, while which no decoder runs a step; else empty.
    """

    version: int = 0
    torn: str = ""
