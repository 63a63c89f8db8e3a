"""The environment of a running episode: where its calls run, how long they may take, and whose failures they are."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jsonschema_rs
import structlog
from attrs import define, field

from turnwise import Task
from turnwise.errors import (
    ConfigError,
    DataError,
    EngineError,
    InfrastructureError,
    ToolError,
    TurnwiseError,
    boundary,
    describe,
)
from turnwise.types import ToolSchema
from turnwise_environments.call_thread import CallFailed, CallThread
from turnwise_environments.config import EnvironmentConfig
from turnwise_environments.protocol import Action, Environment, Observation, Turn

_PASSED = (ConfigError, DataError, EngineError, InfrastructureError, ToolError)


class EnvironmentFailedError(TurnwiseError):
    """An environment raised, hung or returned something else than an observation."""


@define(eq=False)
class LiveEnvironment:
    """
    One environment. Its failures are owned by `tool`, unless they name another owner.

    Attributes:
        name: in the config.
        config: the deadlines.
        build: makes it.
    """

    name: str
    config: EnvironmentConfig
    build: Callable[[], Environment]
    _environment: Environment | None = field(default=None, init=False)
    _validators: dict[str, jsonschema_rs.Validator] = field(factory=dict, init=False)
    _thread: CallThread = field(init=False)
    _closed: bool = field(default=False, init=False)
    _hangs: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = CallThread(self.name)

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The schemas of the environment's tools."""
        return tuple(getattr(self._environment, "tools", ()))

    @property
    def whole_turns(self) -> bool:
        """Whether `step` takes whole turns."""
        return bool(getattr(self._environment, "whole_turns", False))

    async def reset(self, task: Task, seed: int) -> Observation:
        """Make the environment and start it."""
        with boundary("tool", f"environment {self.name!r}"):
            self._environment = await self._call(self.build, "constructor", self.config.reset_s)
            value = await self._call(self._environment.reset, "reset", self.config.reset_s, task, seed)
            observation = self._as_observation(value, "reset")
            if observation.reward or observation.ends:
                raise EnvironmentFailedError(f"environment {self.name!r}: reset returned a reward, or the end")
            self._validators = self._compile_tools()
        return observation

    async def step(self, action: Action | Turn) -> Observation:
        """Apply an action; `ToolError` has a text for the model."""
        if self._environment is None:
            raise EnvironmentFailedError(f"environment {self.name!r} has not started")
        with boundary("tool", f"environment {self.name!r}"):
            try:
                value = await self._call(self._environment.step, "step", self.config.step_s, action)
            except ToolError as error:
                refused = error
            else:
                return self._checked_answer(self._as_observation(value, "step"))
        raise refused  # outside of the boundary, which would make it a failure of the episode

    async def finish(self) -> Observation:
        """Tell an environment that asks for it that the episode ends; the observation has the reward of that."""
        method = getattr(self._environment, "finish", None)
        if method is None:
            return Observation()
        with boundary("tool", f"environment {self.name!r}"):
            return self._as_observation(await self._call(method, "finish", self.config.step_s), "finish")

    def complaint(self, name: str, arguments: Mapping[str, object]) -> str:
        """Return the mismatch of a call's arguments as a text for the model; empty when they fit."""
        try:
            error = next(self._validators[name].iter_errors(dict(arguments)), None)
        except ValueError as unreadable:  # nested too deeply, or a lone surrogate
            return f"Error: the arguments of {name!r} cannot be read: {unreadable}"
        return f"Error: the arguments of {name!r} do not fit: {error.message}" if error else ""

    async def close(self, *, wait: bool = True) -> None:
        """
        Close the environment; a failure is logged.

        Without `wait`, or after a call that hangs, a sync `close` runs when the thread reaches it.
        """
        is_sync = not inspect.iscoroutinefunction(getattr(self._environment, "close", None))
        if self._closed or self._environment is None or (is_sync and (self._hangs or not wait)):
            self.abandon()
            return
        self._closed = True
        try:
            await self._call(self._environment.close, "close", self.config.close_s)
        except Exception as error:  # noqa: BLE001 - the episode has its result, which must not be lost
            structlog.get_logger().warning("environment not closed", environment=self.name, error=describe(error))
        finally:
            self._thread.end()

    def abandon(self) -> None:
        """Close the environment of an episode that left it, without waiting; only where `close` is sync."""
        environment = self._environment
        if not self._closed and environment is not None and not inspect.iscoroutinefunction(environment.close):

            def close() -> None:
                with suppress(BaseException):
                    environment.close()

            self._thread.submit(close)
        self._closed = True
        self._thread.end()

    async def _call(self, function: Callable[..., Any], method: str, seconds: float, *arguments: object) -> Any:
        try:
            async with asyncio.timeout(seconds) as alarm:
                if inspect.iscoroutinefunction(function):
                    return await function(*arguments)
                value = await self._thread.run(function, *arguments)
                return await value if inspect.isawaitable(value) else value
        except Exception as error:  # noqa: BLE001 - raised again, with the name of the environment
            if isinstance(error, TimeoutError) and alarm.expired():
                self._hangs = True
                text = f"environment {self.name!r}: {method} took longer than {seconds:g} s"
                raise EnvironmentFailedError(text) from None
            cause = (error.__cause__ or error) if isinstance(error, CallFailed) else error
            if isinstance(cause, _PASSED):
                raise cause from None
            text = f"environment {self.name!r}: {method} raised {describe(cause)}"
            raise EnvironmentFailedError(text) from cause

    def _as_observation(self, value: object, method: str) -> Observation:
        observation = Observation(text=value) if isinstance(value, str) else value
        if not isinstance(observation, Observation):
            shown = repr(value)[:200]
            raise EnvironmentFailedError(
                f"environment {self.name!r}: {method} returned {shown}, expected an Observation or a string"
            )
        return observation

    def _checked_answer(self, observation: Observation) -> Observation:
        if any(message["role"] == "assistant" for message in observation.messages):
            raise EnvironmentFailedError(f"environment {self.name!r}: step returned a message of the assistant")
        return observation

    def _compile_tools(self) -> dict[str, jsonschema_rs.Validator]:
        try:
            functions = [schema["function"] for schema in self.tools]
            return {each["name"]: jsonschema_rs.validator_for(dict(each["parameters"])) for each in functions}
        except (KeyError, TypeError, ValueError) as error:
            text = f"environment {self.name!r}: a schema in its tools is not usable: {describe(error)}"
            raise EnvironmentFailedError(text) from error
