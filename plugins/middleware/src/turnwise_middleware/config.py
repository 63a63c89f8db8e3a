"""Options of the middleware."""

from __future__ import annotations

import re
from typing import Any

from attrs import Attribute, field, frozen, validators


def _compiles(_instance: object, _attribute: Attribute[Any], value: tuple[str, ...]) -> None:
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"'patterns' has no regular expression: {pattern!r}: {error}") from error


@frozen(kw_only=True)
class RedactSecretsConfig:
    """
    Options of the middleware `redact_secrets`.

    Attributes:
        patterns: regular expressions of further secrets.
        environment: environment variables whose values are secrets.
        tools: tools whose results are redacted; empty for all.
        replacement: text in place of a secret.
    """

    patterns: tuple[str, ...] = field(default=(), validator=_compiles)
    environment: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    replacement: str = "[redacted]"


@frozen(kw_only=True)
class ToolRateConfig:
    """
    Options of the middleware `tool_rate`.

    Attributes:
        tools: tools that it limits, each by itself; empty for all.
        max_calls: most calls of one tool in one episode; further ones return an error; null for no limit.
        per_second: most calls of one tool in a second, over all episodes of one process; further ones wait; null for no
            limit. The wait counts towards the deadline of the call.
    """

    tools: tuple[str, ...] = ()
    max_calls: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    per_second: float | None = field(default=None, validator=validators.optional(validators.gt(0)))


@frozen(kw_only=True)
class ShapeRewardConfig:
    """
    Options of the middleware `shape_reward`.

    Attributes:
        scale: factor of the episode's reward.
        turn_price: subtracted for each turn after the free ones.
        free_turns: turns without a price.
        least: smallest reward after that; null for no bound.
        most: largest reward after that; null for no bound.
    """

    scale: float = 1.0
    turn_price: float = field(default=0.0, validator=validators.ge(0))
    free_turns: int = field(default=1, validator=validators.ge(0))
    least: float | None = None
    most: float | None = None
