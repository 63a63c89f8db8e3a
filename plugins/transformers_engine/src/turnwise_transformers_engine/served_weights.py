"""The weights that decoders read, and the version that they give to the tokens that they sample."""

from __future__ import annotations

from attrs import define


@define(eq=False)
class ServedWeights:
    """
    The weights in the model's memory.

    They change only while every decoder is paused. So what a decoder reads here in a step is true of the tokens that
    the step samples, whichever thread asks, and nobody else keeps the number.

    Attributes:
        version: of the last update.
        torn: why the memory holds no version's weights; empty if it does. No decoder runs a step otherwise.
    """

    version: int = 0
    torn: str = ""
