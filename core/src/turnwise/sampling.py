"""Sampling parameters of requests to an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from attrs import Attribute, field, frozen, validators

_OWN_NEEDS: Final = frozenset({"best_of", "logprobs", "max_new_tokens", "n", "prompt_logprobs", "stream"})
"""Options of engines on which the record of a turn depends."""


@frozen(kw_only=True)
class Grammar:
    """
    A grammar of a turn, for an engine with the capability `grammars`, which samples no other text.

    The engine samples from its distribution without the ids that the grammar excludes; an id that ends a turn is
    possible exactly where the text may end.

    Attributes:
        text: in the Lark dialect of llguidance.
        num_read: how many of the last ids of the context are the start of the turn, which was interrupted.
    """

    text: str
    num_read: int = 0


@frozen(kw_only=True)
class SamplingParams:
    """
    Sampling parameters, under the usual names of inference engines.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass, in (0, 1].
        top_k: number of most likely ids to keep; -1 keeps all.
        max_tokens: most tokens of one turn; None leaves it to the episode's budget.
        stop_token_ids: ids that end a turn besides the model's own end-of-turn ids; they stay in the output.
        stop: strings that end a turn; needs an engine with the capability `stop_strings`.
        seed: of this request; None lets the episode derive one from the run's seed.
        extra: options of the engine by their names there, such as `min_p` and `repetition_penalty`; an engine refuses
            names that are not among its `Capabilities.sampling_options`.
    """

    temperature: float = field(default=1.0, validator=validators.ge(0))
    top_p: float = field(default=1.0, validator=[validators.gt(0), validators.le(1)])
    top_k: int = field(default=-1)
    max_tokens: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    # Not hashed, because a dict cannot be; equal parameters still have equal hashes.
    extra: Mapping[str, Any] = field(factory=dict, hash=False)

    @top_k.validator
    def _check_top_k(self, _attribute: object, value: int) -> None:
        if value != -1 and value < 1:
            raise ValueError(f"'top_k' must be -1 (all) or at least 1: {value}")

    @extra.validator
    def _check_extra(self, _attribute: Attribute[Mapping[str, Any]], value: Mapping[str, object]) -> None:
        for name, item in value.items():
            if name in SamplingParams.__annotations__:
                raise ValueError(f"'extra.{name}' must be set as {name}, beside extra")
            if name in _OWN_NEEDS:
                raise ValueError(f"'extra.{name}' must not be set: the record of a turn depends on it")
            try:
                json.dumps(item, allow_nan=False)
            except (TypeError, ValueError):
                raise ValueError(f"'extra.{name}' must be a JSON value: {item!r}") from None

    def with_(self, **changes: object) -> SamplingParams:
        """Return a copy with some fields changed."""
        return SamplingParams(**{name: getattr(self, name) for name in SamplingParams.__annotations__} | changes)
