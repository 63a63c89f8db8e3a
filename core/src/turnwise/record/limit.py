"""The limits of an episode: the room that they leave, and the one that ended it."""

from __future__ import annotations

from typing import Final

from attrs import frozen

RESPONSE: Final = "rollout.response_length"
ENGINE_CONTEXT: Final = "engine context"
"""The most tokens of prompt and response that the engine takes."""
SAMPLED: Final = "rollout.max_sampled_tokens"
RECORDS: Final = "rollout.max_records"
PICTURES: Final = "rollout.max_pictures"
PROMPT: Final = "rollout.prompt_length"
TURN: Final = "rollout.sampling.max_tokens"
VALIDATION_TURN: Final = "rollout.validation_sampling.max_tokens"
AGENT_TURN: Final = "max_tokens of the agent"
"""The length that the agent, or the program behind it, asked for in a request."""
ENGINE: Final = "engine"
"""The engine ended a turn before it had as many tokens as it may have had."""


@frozen(kw_only=True)
class ReachedLimit:
    """
    The limit that ended an episode.

    Attributes:
        name: key of the config that sets the limit, such as `rollout.response_length`. A limit that no key of the core
            sets has a phrase: `engine context`, `engine`, `max_tokens of the agent`, or an option of the agent such as
            `max_turns of the agent`.
        value: the limit; None when it is not known.
        reason: one line for people, such as "the observation of 40 tokens did not fit into the 12 that were left".
    """

    name: str
    value: int | None = None
    reason: str = ""

    @classmethod
    def of_agent(cls, name: str, value: int) -> ReachedLimit:
        """Return the limit that an option of an agent sets."""
        return cls(name=f"{name} of the agent", value=value, reason=f"the agent ended the episode at its {name}")

    def __str__(self) -> str:
        value = "" if self.value is None else f": {self.value}"
        return f"{self.reason} ({self.name}{value})"


@frozen
class Room:
    """The number of tokens that still fit, and the name and the value of the limit that makes it no more."""

    num_tokens: int
    limit: str
    value: int

    def reached(self, num_tokens: int) -> ReachedLimit:
        """Return the limit that ended a turn of so many tokens with the finish reason `length`."""
        if num_tokens < self.num_tokens:
            reason = f"the engine ended the last turn after {num_tokens} of the {self.num_tokens} tokens that were left"
            return ReachedLimit(name=ENGINE, reason=reason)
        used = f"all {num_tokens} tokens" if num_tokens > 1 else "the only token"
        return ReachedLimit(name=self.limit, value=self.value, reason=f"the last turn used {used} that it could have")
