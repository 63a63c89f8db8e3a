"""What an episode is given before it runs: which task, what it may use, and what it shares with others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol

from attrs import field, frozen

from turnwise.episode_spec import Counters as Counters
from turnwise.episode_spec import EpisodeSpec as EpisodeSpec
from turnwise.errors import ConfigError, DataError, TrajectoryError
from turnwise.layout import Layout, Objective
from turnwise.protocols import Interaction
from turnwise.record import TokenRecord
from turnwise.telemetry import Observers
from turnwise.trajectory import Path, Trajectory
from turnwise.types import Capabilities, GenerateRequest, GenerateResult, Task, TokenArray

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
        loop_lag_s: seconds for which something may block the event loop before a log line says what.
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
    loop_lag_s: float = 1.0
    max_steps: int = 1000


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
        worker: name of the worker.
    """

    engine: EngineClient
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    interaction: Interaction | None = None
    observers: Observers = field(factory=Observers)
    worker: str = "worker 0"


def fitting_prompt(prompt_ids: TokenArray, task: Task, limits: Limits) -> TokenArray:
    """Return a prompt that fits `prompt_length`, cut by the policy; `PromptTooLongError` when that says not to."""
    limit = limits.prompt_length
    if len(prompt_ids) <= limit:
        return prompt_ids
    if limits.prompt_policy == "truncate_left":
        return prompt_ids[-limit:]
    if limits.prompt_policy == "truncate_right":
        return prompt_ids[:limit]
    raise PromptTooLongError(
        f"prompt of task {task.uid!r} (row {task.sample_index}) has {len(prompt_ids)} tokens, "
        f"more than prompt_length={limit}; raise it or set data.prompt_policy to drop or truncate"
    )


def layout_of(record: TokenRecord) -> Layout | None:
    """Return the layout that a request of a record carries: none while nothing has forked."""
    if isinstance(record, Path):
        return record.layout
    return record.layout if isinstance(record, Trajectory) and record.has_blocks else None


def refuse_objective(value: Objective, capabilities: Capabilities, trajectories: Sequence[Trajectory]) -> None:
    """Raise `ConfigError` where the engine cannot serve an objective, `TrajectoryError` where it comes too late."""
    if value is Objective.EXACT and not capabilities.layouts:
        raise ConfigError("objective 'exact' needs an engine that takes layouts; use 'expanded' or 'auto'")
    if any(trajectory.has_blocks or trajectory.open_paths for trajectory in trajectories):
        raise TrajectoryError(f"the episode has forked under another objective than {value.value!r}, and keeps it")


def add_sampled(record: TokenRecord, result: GenerateResult, *, drop: bool = False) -> None:
    """Append what an engine sampled, or all of it but the last token."""
    num_tokens, version = len(result.token_ids) - drop, result.weight_version
    versions = version if isinstance(version, int) else version[:num_tokens]
    record.add_action(result.token_ids[:num_tokens], result.logprobs[:num_tokens], versions)
