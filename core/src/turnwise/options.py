"""Options of a rollout that both configs and the runtime read, so that each is declared once."""

from __future__ import annotations

from typing import Final, Literal

from attrs import field, frozen, validators

from turnwise.types import SamplingParams

DataColumn = Literal["messages", "prompt", "ground_truth", "uid", "sample_index", "agent_name", "data_source"]
PromptPolicy = Literal["error", "drop", "truncate_left", "truncate_right"]
"""Treatment of a prompt longer than `prompt_length`."""
SpecialTokenPolicy = Literal["text", "refuse", "parse"]
"""Treatment of special tokens that the contents of messages spell."""
LogFormat = Literal["auto", "console", "json"]
"""Format of log lines; `auto` is `console` on a terminal and `json` elsewhere."""

at_least_0: Final = validators.ge(0)
at_least_1: Final = validators.ge(1)
more_than_0: Final = validators.gt(0.0)


@frozen(kw_only=True)
class Deadlines:
    """
    Time limits of an episode, in seconds.

    Attributes:
        tool_call_s: one tool call; the model reads an error when it is over.
        turn_s: from one generate call to the next.
        episode_s: all steps of an episode.
        reward_s: scoring an episode.
        abort_grace_s: time for an engine to return its sampled tokens when an episode is stopped.
        loop_lag_s: time for which the event loop may be blocked before a log line names the culprit.
    """

    tool_call_s: float = field(default=60.0, validator=more_than_0)
    turn_s: float = field(default=600.0, validator=more_than_0)
    episode_s: float = field(default=3600.0, validator=more_than_0)
    reward_s: float = field(default=60.0, validator=more_than_0)
    abort_grace_s: float = field(default=5.0, validator=more_than_0)
    loop_lag_s: float = field(default=1.0, validator=more_than_0)


@frozen(kw_only=True)
class GroupOptions:
    """
    Episodes of a task and how their tokens are drawn.

    Attributes:
        n: episodes per task: the size of a group.
        validation_n: episodes per task in validation.
        episode_tries: most attempts of an episode that loses its workspace or another resource. An attempt after the
            first starts from the prompt, with the same seeds; on Ray, on another worker if one has room.
        seed: of the run; every request derives its own from it.
        sampling: sampling parameters.
        validation_sampling: sampling parameters in validation; greedy unless set.
    """

    n: int = field(default=1, validator=at_least_1)
    validation_n: int = field(default=1, validator=at_least_1)
    episode_tries: int = field(default=2, validator=at_least_1)
    seed: int = field(default=0, validator=at_least_0)
    sampling: SamplingParams = field(factory=SamplingParams)
    validation_sampling: SamplingParams = field(factory=lambda: SamplingParams(temperature=0.0))
