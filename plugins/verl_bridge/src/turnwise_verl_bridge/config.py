"""The options of the engine `verl`."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class VerlEngineConfig:
    """
    Options of the facade over verl's servers; the bridge sets them from verl's config.

    Attributes:
        max_context: limit of prompt and response tokens together; null leaves the check to verl.
    """

    max_context: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
