"""Inputs of an episode: its limits, and the parts that it shares with the other episodes of its worker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from turnwise.errors import ConfigError, PromptTooLongError, TrajectoryError
from turnwise.events.dispatch import Observers
from turnwise.layout import Objective
from turnwise.options import Deadlines, PromptPolicy
from turnwise.protocols import Interaction
from turnwise.record.column_specs import ColumnSpec
from turnwise.record.pictures import first_tokens, last_tokens
from turnwise.record.trajectory import Trajectory
from turnwise.types import Capabilities, GenerateRequest, GenerateResult, MediaTokens, Task, TokenArray


@frozen(kw_only=True)
class Limits(Deadlines):
    """
    Limits of one episode.

    Attributes:
        prompt_length: most prompt tokens.
        response_length: most response tokens, observations included.
        prompt_policy: treatment of a longer prompt; here, `error` and `drop` fail the episode.
        max_steps: number of steps after which an agent that does not terminate fails.
        max_records: most records of the episode.
        max_sampled_tokens: sampled tokens after which no further request is sent, over all records and with samples
            that were not appended; None for no limit. Requests that run at the same time may exceed it together.
        max_pictures: most pictures of a record.
    """

    prompt_length: int = 1024
    response_length: int = 1024
    prompt_policy: PromptPolicy = "error"
    max_steps: int = 1000
    max_records: int = 64
    max_sampled_tokens: int | None = None
    max_pictures: int = 256


class EngineClient(Protocol):
    """The methods of an engine, or of a pool of replicas, that an episode uses."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the engine; constant."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue a context."""

    async def abort(self, request_id: str) -> None:
        """End a request early."""


@frozen(kw_only=True)
class EpisodeContext:
    """
    Parts that the episodes of one worker share.

    Attributes:
        engine: samples tokens.
        spawn: starts a background coroutine in the worker's task group.
        interaction: simulated user, if one is configured.
        observers: receive the events.
        worker: name of the worker.
        columns: declarations of open columns by name.
    """

    engine: EngineClient
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    interaction: Interaction | None = None
    observers: Observers = field(factory=Observers)
    worker: str = "worker 0"
    columns: Mapping[str, ColumnSpec] = field(factory=dict)


def apply_prompt_policy(prompt_ids: TokenArray | MediaTokens, task: Task, limits: Limits) -> TokenArray | MediaTokens:
    """Return a prompt that fits `prompt_length`; `PromptTooLongError` if the policy does not shorten a longer one."""
    limit = limits.prompt_length
    if len(prompt_ids) <= limit:
        return prompt_ids
    # By tokens, so the template's own tokens at that end are lost as well. A picture stays whole, or is lost whole.
    if limits.prompt_policy == "truncate_left":
        return last_tokens(prompt_ids, limit)
    if limits.prompt_policy == "truncate_right":
        return first_tokens(prompt_ids, limit)
    raise PromptTooLongError(
        f"prompt of task {task.uid!r} (row {task.sample_index}) has {len(prompt_ids)} tokens, "
        f"more than prompt_length={limit}; raise it, or set data.prompt_policy to drop, truncate_left or "
        "truncate_right",
        num_tokens=len(prompt_ids),
        max_tokens=limit,
    )


def check_objective(value: Objective, capabilities: Capabilities, trajectories: Sequence[Trajectory]) -> None:
    """Raise `ConfigError` if the engine does not support an objective, `TrajectoryError` after the first fork."""
    if value is Objective.EXACT and not capabilities.layouts:
        raise ConfigError("objective 'exact' needs an engine that takes layouts; use 'expanded' or 'auto'")
    if any(trajectory.has_blocks or trajectory.open_paths for trajectory in trajectories):
        raise TrajectoryError(f"the episode has already forked, so its objective cannot change to {value.value!r}")
