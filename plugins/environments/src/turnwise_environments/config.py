"""Options of the agent `environment`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen, validators

from turnwise.config.parts import CodePlace


@frozen(kw_only=True)
class EnvironmentConfig:
    """
    An environment, and the limits of its episodes.

    Attributes:
        environment: registered name, or the place of a class or factory: `package.module:Name`, or `./file.py:Name` of
            a file that `modules` lists.
        options: keyword arguments for it.
        system_prompt: inserted first in conversations that have no system message; empty inserts none.
        max_turns: most turns of the model; null lets only the environment and the budget limit them.
        reset_s: seconds that the reset may take.
        step_s: seconds that a step may take.
        close_s: seconds that closing may take.
    """

    environment: CodePlace = field(validator=validators.min_len(1))
    options: Mapping[str, Any] = field(factory=dict)
    system_prompt: str = ""
    max_turns: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    reset_s: float = field(default=120.0, validator=validators.gt(0.0))
    step_s: float = field(default=60.0, validator=validators.gt(0.0))
    close_s: float = field(default=10.0, validator=validators.gt(0.0))
