"""The environment `verifiers`: environments of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import verifiers.v1 as vf
from pydantic import ValidationError

from turnwise import Message, Task, ToolCall
from turnwise.errors import ConfigError, DataError, InfrastructureError
from turnwise.types import ToolSchema
from turnwise_environments.protocol import Action, Observation, Turn
from turnwise_environments.verifiers_service import Exchange, VerifiersService

_INFRASTRUCTURE: Final = ("InterceptionError", "ProviderError", "SandboxError", "TunnelError")
"""Errors of verifiers that are failures of a machine or a service."""


class VerifiersEnvironment:
    """
    An episode of an environment of verifiers, which runs its own program, tools, users and rewards.

    The program is the harness of verifiers. It calls a model at an address; the replies are the turns of the agent. The
    conversation may only grow: a harness that shortens or rewrites it fails the episode. The reward comes with the end.

    Args:
        taskset: id of an installed taskset, or the options of one with its `id`.
        env: more of the environment's config, as in the section `[env]` of verifiers. A role without a harness has the
            taskset's own, else `null`, a chat loop with tools; a role without a runtime runs on this machine.
        column: column of the task that has the index of the verifiers task.

    Raises:
        ConfigError: no such taskset, or the config does not fit.
    """

    whole_turns = True

    def __init__(
        self, *, taskset: str | Mapping[str, Any], env: Mapping[str, Any] | None = None, column: str = "idx"
    ) -> None:
        chosen = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
        self._config, self._column = _read_config(chosen, dict(env or {})), column
        self._service: VerifiersService | None = None
        self._exchange: Exchange | None = None
        self._seen: list[dict[str, Any]] = []
        self.tools: tuple[ToolSchema, ...] = ()

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the episode, and return the messages of its first request. Its task decides all; the seed is unused."""
        index = task.extra.get(self._column)
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise DataError(f"the column {self._column!r} must have the index of a verifiers task, got {index!r}")
        self._service = VerifiersService.acquire(self._config)
        try:
            self._exchange = await self._service.call(self._service.open(index))
        except IndexError as error:
            raise DataError(str(error)) from error
        request = await self._service.call(self._exchange.next())
        if not isinstance(request, vf.Episode):
            self.tools = tuple(request.get("tools") or ())
            self._seen = request["messages"]
            return Observation(messages=tuple(_as_message(message) for message in self._seen))
        self._check(request)
        raise RuntimeError("the episode of verifiers ended before the first turn")

    async def step(self, action: Action | Turn) -> Observation:
        """Reply with a turn, and return the next messages or the reward."""
        turn = action if isinstance(action, Turn) else _as_turn(action)
        service, exchange = self._playing()
        calls = [_as_call(call, call_id) for call, call_id in zip(turn.calls, turn.ids, strict=True)]
        reply = {"role": "assistant", "content": turn.text or None, **({"tool_calls": calls} if calls else {})}
        request = await service.call(exchange.answer(reply, "tool_calls" if calls else "stop"))
        return self._end(request) if isinstance(request, vf.Episode) else self._extend(reply, request["messages"])

    async def finish(self) -> Observation:
        """Let verifiers score the episode as it is."""
        service, exchange = self._playing()
        request = await service.call(exchange.exhaust())
        if isinstance(request, vf.Episode):
            return self._end(request)
        raise RuntimeError("the harness asked for another turn although no token is left")

    def close(self) -> None:
        """End the episode, and its programs with it."""
        service, exchange = self._service, self._exchange
        self._service = self._exchange = None
        if service is not None:
            service.end(exchange)

    def _playing(self) -> tuple[VerifiersService, Exchange]:
        if self._service is None or self._exchange is None:
            raise RuntimeError("the environment is not reset")
        return self._service, self._exchange

    def _extend(self, reply: Mapping[str, object], messages: list[dict[str, Any]]) -> Observation:
        """Return the messages after the reply; the ones before it must be as they were."""
        known = [*self._seen, reply]
        if [_content(message) for message in messages[: len(known)]] != [_content(message) for message in known]:
            raise RuntimeError("the harness rewrote the conversation, whose tokens are already in the record")
        self._seen = messages
        return Observation(messages=tuple(_as_message(message) for message in messages[len(known) :]))

    def _end(self, episode: vf.Episode) -> Observation:
        self._check(episode)
        session = self._exchange.session if self._exchange is not None else ""
        trace = next((each for each in episode.traces if each.id == session), episode.traces[-1])
        rewards = {f"reward/{name}": reward.value for name, reward in trace.rewards.items()}
        return Observation(
            reward=trace.reward,
            done=not trace.is_truncated,
            truncated=trace.is_truncated,
            metrics={**trace.metrics, **rewards},
        )

    def _check(self, episode: vf.Episode) -> None:
        """Raise the error of an episode that failed."""
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if episode.ok:
            return
        text = "; ".join(f"{error.type}: {error.message}" for error in errors) or "verifiers gave no reason"
        if any(error.type in _INFRASTRUCTURE for error in errors):
            raise InfrastructureError(f"verifiers: {text}")
        raise RuntimeError(text)


def _read_config(taskset: Mapping[str, object], env: dict[str, Any]) -> vf.EnvConfig:
    taskset_id = str(taskset.get("id", ""))
    try:
        kind = vf.env_config_type(taskset_id, str(env.get("id", "")))
        for role, declared in kind.model_fields.items():
            if isinstance(declared.default, vf.AgentConfig):
                env[role] = _complete_role(taskset_id, declared.default, dict(env.get(role) or {}))
        return kind.model_validate({**env, "taskset": dict(taskset)})
    except ModuleNotFoundError as error:
        raise ConfigError(str(error)) from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"the config of verifiers does not fit: {wrong}") from error


def _complete_role(taskset_id: str, declared: vf.AgentConfig, role: dict[str, Any]) -> dict[str, Any]:
    """Add a harness and a runtime that need neither a container nor a remote service, where none is chosen."""
    if "harness" not in role and declared.harness is None and vf.default_harness_id(taskset_id) == "bash":
        role["harness"] = {"id": "null"}
    if "runtime" not in role and "runtime" not in declared.model_fields_set:
        role["runtime"] = {"type": "subprocess"}
    return role


def _as_turn(action: str | ToolCall) -> Turn:
    return Turn(text=action) if isinstance(action, str) else Turn(calls=(action,), ids=("call_0",))


def _as_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """Return a call as the API has it; a malformed one keeps its text, which the harness answers."""
    arguments = call.raw if call.error else json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.name or "unknown", "arguments": arguments}}


def _as_message(message: Mapping[str, Any]) -> Message:
    kept = {key: message[key] for key in ("role", "name", "tool_call_id", "tool_calls") if message.get(key)}
    return {**kept, "content": _text(message.get("content"))}


def _content(message: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what a message says; harnesses add and drop other fields."""
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    return message["role"], _text(message.get("content")), message.get("tool_call_id"), calls


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise RuntimeError("the conversation has parts that are no text, such as images, which the record cannot hold")
    return "".join(part["text"] for part in content)
