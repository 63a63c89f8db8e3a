"""What an episode is given before it runs: which task, what it may use, and what it shares with others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol

from attrs import define, field, frozen

from turnwise.errors import DataError
from turnwise.protocols import Interaction
from turnwise.telemetry import Observers
from turnwise.types import Capabilities, GenerateRequest, GenerateResult, SamplingParams, Task

PromptPolicy = Literal["error", "drop", "truncate_left", "truncate_right"]


class PromptTooLongError(DataError):
    """A prompt is longer than `prompt_length` and the policy does not shorten it."""


@frozen(kw_only=True)
class Limits:
    """
    What one episode may use.

    Attributes:
        prompt_length: most prompt tokens.
        response_length: most response tokens, observations included.
        prompt_policy: what becomes of a longer prompt; `error` and `drop` fail the episode here.
        tool_call_s: seconds for one tool call; the model is told when it is over.
        turn_s: seconds from a generate call to the next.
        episode_s: seconds for all steps.
        reward_s: seconds for the reward.
        abort_grace_s: seconds that an engine gets to hand back what it had sampled.
        max_steps: steps after which an agent that never ends is stopped.
    """

    prompt_length: int = 1024
    response_length: int = 1024
    prompt_policy: PromptPolicy = "error"
    tool_call_s: float = 60.0
    turn_s: float = 600.0
    episode_s: float = 3600.0
    reward_s: float = 60.0
    abort_grace_s: float = 5.0
    max_steps: int = 1000


@frozen(kw_only=True)
class EpisodeSpec:
    """
    Which episode to run: a task, and which of its group's rollouts.

    Attributes:
        task: the row.
        agent_name: the agent that runs it.
        rollout_n: number of the rollout in its group, from 0.
        global_step: training step that asked for it.
        validation: whether it samples with the validation parameters.
        seed: of the run; every request derives its own.
        sampling: how tokens are drawn.
    """

    task: Task
    agent_name: str
    rollout_n: int = 0
    global_step: int = 0
    validation: bool = False
    seed: int = 0
    sampling: SamplingParams = field(factory=SamplingParams)


class EngineClient(Protocol):
    """The part of an engine, or of a pool of them, that an episode needs."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue a context."""

    async def abort(self, request_id: str) -> None:
        """End a request early."""


@frozen(kw_only=True)
class Services:
    """
    What the episodes of one worker share.

    Attributes:
        engine: where tokens come from.
        spawn: starts a background coroutine in the worker's task group.
        interaction: the user simulator, if one is configured.
        observers: who hears the events.
    """

    engine: EngineClient
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    interaction: Interaction | None = None
    observers: Observers = field(factory=Observers)


@define(eq=False)
class Counters:
    """What an episode has used so far; `turnwise.driver` turns it into `EpisodeMetrics`."""

    llm_s: float = 0.0
    tool_s: float = 0.0
    num_turns: int = 0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_cached_tokens: int = 0
    tool_reward: float = 0.0
    extra: dict[str, float] = field(factory=dict)
