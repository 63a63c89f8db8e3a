"""The contract of environments: the world that an episode plays in."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from numbers import Real
from typing import Protocol, runtime_checkable

from attrs import field, frozen

from turnwise import Message, Task, ToolCall
from turnwise.media import Picture


@frozen(kw_only=True)
class Turn:
    """
    A whole turn of the model, for environments that ask for it with `whole_turns`.

    Attributes:
        text: without the reasoning and the calls.
        calls: in order; one with an `error` is malformed, and has its text as `raw`.
        ids: of the calls; a message with a response has one as `tool_call_id`.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    ids: tuple[str, ...] = ()


Action = str | ToolCall
"""A turn of the model as text, or one of its calls of the environment's tools."""

_ROLES = ("assistant", "system", "tool", "user")


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"a reward or metric must be a finite number, got {value!r}")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the text of an observation must be a string, got {type(value).__name__}")
    return value.encode(errors="replace").decode()  # a lone surrogate has no tokens


def _pictures(pictures: Sequence[Picture]) -> tuple[Picture, ...]:
    for picture in pictures:
        if not isinstance(picture, Picture):
            kind = type(picture).__name__
            raise TypeError(f"a picture of an observation must be one of turnwise.media.read_picture, got {kind}")
    return tuple(pictures)


def _messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise ValueError(f"a message of an observation must have one of the roles {_ROLES}, got {message!r}")
    return tuple(messages)


def _numbers(metrics: Mapping[str, float]) -> Mapping[str, float]:
    return {str(name): _finite(value) for name, value in metrics.items()}


@frozen(kw_only=True)
class Observation:
    """
    An environment's answer to an action, or its first words.

    Attributes:
        text: for the model: a message of the user, or the response to the call of a tool.
        pictures: that the model sees behind the text; `turnwise.media.read_picture` makes one of the bytes of a file.
        messages: in place of both, for answers of another form. At the reset they are the whole prompt, in place of the
            task's messages; only there may the assistant speak.
        reward: of the action.
        done: the environment has ended; the model does not see this observation.
        truncated: it has ended at its own limit, and not by its rules.
        metrics: numbers of this step, which are added up in the episode's metrics as `environment/NAME`.

    Raises:
        ValueError, TypeError: a reward is not finite, a text or a picture is none, or a message has another role.
    """

    text: str = field(default="", converter=_text)
    pictures: tuple[Picture, ...] = field(default=(), converter=_pictures)
    messages: tuple[Message, ...] = field(default=(), converter=_messages)
    reward: float = field(default=0.0, converter=_finite)
    done: bool = field(default=False, converter=bool)
    truncated: bool = field(default=False, converter=bool)
    metrics: Mapping[str, float] = field(factory=dict, converter=_numbers)

    @property
    def ends(self) -> bool:
        """Whether the episode ends with it."""
        return self.done or self.truncated


@runtime_checkable
class Environment(Protocol):
    """
    The environment of one episode. An object serves one episode; its class or factory is called once for each.

    Methods are sync or async. The sync ones run in a thread of the environment, all in the same one, so they may block
    and need no lock. The constructor opens nothing: it is also called to check the options when the run is built.

    Optional attributes:
        tools: schemas, in the OpenAI form, of tools that the model may call; read after `reset`.
        repeatable: True when the same task, seed and actions give the same observations. An interrupted episode then
            continues; otherwise it starts again.
        whole_turns: True for an environment that runs the calls of a turn itself: `step` then gets a `Turn` for each
            turn, malformed calls included. The run cannot have other tools.
        finish: a method without arguments, sync or async. It is called when the episode ends before the environment,
            at `max_turns` or without tokens; the reward of its `Observation` adds to the last turn.

    Exceptions of the methods fail the episode, owned by `tool`, except for these:
        ToolError: from `step`: its text is for the model, which may try again.
        DataError: the task is unusable; the episode's failure is owned by `data`.
        InfrastructureError: a machine or service failed; owned by `infra`, and the loss leaves the episode out.
    """

    def reset(self, task: Task, seed: int) -> Observation | str | Awaitable[Observation | str]:
        """
        Start, and return the first observation; a string is one with that text.

        Args:
            task: of the episode; `extra` has its columns.
            seed: in 0..2**31-1, from the task's column `seed`, or from the run's seed and the task. The episodes of one
                group have the same one.
        """

    def step(self, action: Action) -> Observation | str | Awaitable[Observation | str]:
        """Apply an action; the arguments of a call fit the schema. An action that makes no sense is no exception."""

    def close(self) -> Awaitable[None] | None:
        """Free everything, in every case, also before `reset` and after a failure; a second call does nothing."""
