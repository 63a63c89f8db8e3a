"""The options of the engine `verl`."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class VerlEngineConfig:
    """
    What a run tells the facade over verl's servers; the bridge fills it in from verl's own config.

    Attributes:
        max_context: most tokens of prompt and response together; null when verl is to refuse what is too long.
    """

    max_context: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
