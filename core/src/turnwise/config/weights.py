"""The config sections of weight updates and of shared device memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from attrs import Attribute, field, frozen, validators

WeightDtype = Literal["float32", "float16", "bfloat16"]
MemoryMode = Literal["hybrid", "standalone"]


def _patterns(_instance: object, attribute: Attribute[Mapping[str, str]], value: Mapping[str, str]) -> None:
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"'{attribute.name}' must have regular expressions as keys: {pattern!r}: {error}"
            ) from None


@frozen(kw_only=True)
class WeightsConfig:
    """
    Conversion of weights on their way from a trainer to the engines.

    Attributes:
        dtype: cast weights to it before they are sent; null keeps their type.
        rename: regular expressions and their replacements in names, applied in this order.
        fuse: name of a fused weight to the names of its parts, which are concatenated along the first axis.
        keep_last: keep the last weights for replicas that restart, published by `shm`, `ray` and `disk`, else copied to
            host memory; without them a restarted replica serves nothing until the next update.
        timeout_s: longest wait for a replica to take an update.
    """

    dtype: WeightDtype | None = None
    rename: Mapping[str, str] = field(factory=dict, validator=_patterns)
    fuse: Mapping[str, tuple[str, ...]] = field(factory=dict)
    keep_last: bool = True
    timeout_s: float = field(default=600.0, validator=validators.gt(0))


@frozen(kw_only=True)
class MemoryConfig:
    """
    The use of devices by engines and a trainer.

    Attributes:
        mode: `hybrid` when engines and trainer take turns on the same ones, `standalone` when each has its own.
        level: how deep engines sleep in hybrid mode: 1 keeps their weights in host memory, 2 drops them.
    """

    mode: MemoryMode = "standalone"
    level: Literal[1, 2] = 1
