"""
The methods of middleware: one before and one after each call of a part.

A method before a call may change its input or veto the call; a method after it may change its result. No method sees a
request to the engine, so no token that is trained differs from the one that was sampled.

Each change is counted in the metrics of the episode, as `middleware/NAME/WHAT` (of tools `tool/middleware/NAME/WHAT`).
A method that raises fails the episode, owned by `infra`: the harness is at fault, and neither the model nor the part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

from turnwise import Episode, Resources, Score, Task, ToolCall, ToolResult
from turnwise.types import JsonObject, TokenArray

EngineStage = Literal["start", "sleep", "wake_up", "update_weights", "stop"]


@frozen(kw_only=True)
class ToolUse:
    """
    One call of a tool.

    Attributes:
        name: of the tool.
        arguments: of the call; they fit the tool's schema.
        task: of the episode.
        state: notes of this middleware about the sessions of the episode, JSON values; it may change them.
    """

    name: str
    arguments: JsonObject
    task: Task
    state: dict[str, Any] = field(factory=dict)


class Interception:
    """
    Acts before and after the calls of parts; every method here lets a call pass unchanged.

    One object serves many episodes at once. Methods that are not async must not block.

    Args:
        config: its options.
        resources: of the run: the model and the seed.
    """

    name: str = ""
    """For the metrics and for errors; the name of the class unless set."""

    def __init__(self, config: object = None, resources: Resources | None = None) -> None:
        self.config: Any = config
        self.resources = resources

    @property
    def label(self) -> str:
        return self.name or type(self).__name__

    async def before_tool(self, use: ToolUse) -> JsonObject | ToolResult:
        """Return the arguments of a call; or a result in place of the call, which is not made."""
        return use.arguments

    async def after_tool(self, use: ToolUse, result: ToolResult) -> ToolResult:
        """Return the result of a call; its text becomes the observation. An exception of the tool is a result too."""
        return result

    def before_parse(self, token_ids: TokenArray) -> bool:
        """Return whether sampled tokens are parsed; without that, all of them are text."""
        return True

    def after_parse(self, text: str, calls: tuple[ToolCall, ...]) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text and the calls of a turn."""
        return text, calls

    async def before_step(self, episode: Episode) -> str | None:
        """Return None; or the next state in place of a step of the agent."""
        return None

    async def after_step(self, episode: Episode, state: str) -> str:
        """Return the state after a step of the agent."""
        return state

    async def before_reward(self, episode: Episode) -> Score | float | None:
        """Return None; or a score in place of the reward's."""
        return None

    async def after_reward(self, episode: Episode, scores: tuple[Score, ...]) -> Sequence[Score]:
        """Return the scores of an episode, one for each record, or none."""
        return scores

    def before_postprocess(self, batch: object) -> bool:
        """Return whether the postprocessor runs; without that, it adds no fields."""
        return True

    def after_postprocess(self, batch: object, fields: Mapping[str, object]) -> Mapping[str, Any]:
        """Return the new fields of a batch."""
        return fields

    async def before_engine(self, stage: EngineStage) -> None:
        """Run before a stage of the lifecycle of a replica; an exception is a veto, and the stage fails with it."""

    async def after_engine(self, stage: EngineStage, seconds: float) -> None:
        """Run after a stage of the lifecycle of a replica."""
