"""
The environment `openenv`: environments that an OpenEnv server runs (https://github.com/meta-pytorch/OpenEnv).

The generic client of OpenEnv speaks to the server over a WebSocket, so the package of the environment is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final, TypeVar

from openenv import GenericEnvClient
from websockets.exceptions import WebSocketException

from turnwise import Task, ToolCall
from turnwise.errors import ConfigError, InfrastructureError, ToolError
from turnwise.types import ToolSchema
from turnwise_environments.protocol import Action, Observation

T = TypeVar("T")

_REFUSED: Final = ("INVALID_JSON", "VALIDATION_ERROR", "UNKNOWN_TYPE")
"""Errors of the server that say that the action is wrong, and not the environment."""


class OpenEnvEnvironment:
    """
    A session on an OpenEnv server.

    A server that cannot be reached, or that drops the connection, fails the episode, owned by `infra`: the session, and
    so the state of the environment, is lost with its connection.

    Args:
        url: address of the server, such as `http://localhost:8000`.
        action: field of the environment's action that the text of a turn fills, such as `message`. Without it, a turn
            must be the JSON object of an action.
        text: field of the observation that the model reads; without it, the model reads all fields as JSON.
        tools: whether the environment has MCP tools, which the model then may call.
        reset: more arguments of the reset.
        columns: columns of the task that the reset gets as arguments.
        headers: HTTP headers of the connection.
        timeout_s: seconds that a message may take.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(  # noqa: PLR0913 - a keyword for each option of the config
        self,
        *,
        url: str,
        action: str = "",
        text: str = "",
        tools: bool = False,
        reset: Mapping[str, Any] | None = None,
        columns: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"'url' must start with http:// or https://: {url!r}")
        self._url, self._action, self._text, self._has_tools = url, action, text, tools
        self._reset_options, self._columns = dict(reset or {}), tuple(columns)
        self._client = GenericEnvClient(base_url=url, message_timeout_s=timeout_s, headers=dict(headers or {}))
        self._connection: object = None
        self.tools: tuple[ToolSchema, ...] = ()

    async def reset(self, task: Task, seed: int) -> Observation:
        """Connect, read the tools, and start."""
        await self._ask(self._client.connect())
        self._connection = self._client._ws  # noqa: SLF001 - the client reconnects in silence, to an empty session
        columns = {name: task.extra[name] for name in self._columns if name in task.extra}
        result = await self._ask(self._client.reset(**{"seed": seed, **self._reset_options, **columns}))
        if self._has_tools:
            listed = await self._ask(self._client.step({"type": "list_tools"}))
            self.tools = tuple(_schema(tool) for tool in listed.observation.get("tools", ()))
        return Observation(text=self._read(result.observation))

    async def step(self, action: Action) -> Observation:
        """Send an action; the model reads why the server refuses one."""
        if self._client._ws is not self._connection:  # noqa: SLF001 - see `reset`
            raise InfrastructureError(f"OpenEnv {self._url}: the connection was lost, and the session with it")
        result = await self._ask(self._client.step(self._payload(action)))
        reward = 0.0 if result.reward is None else float(result.reward)
        text = _read_call(result.observation) if isinstance(action, ToolCall) else self._read(result.observation)
        return Observation(text=text, reward=reward, done=bool(result.done))

    async def close(self) -> None:
        """Close the connection, which ends the session."""
        await self._client.close()

    def _payload(self, action: Action) -> dict[str, Any]:
        if isinstance(action, ToolCall):
            return {"type": "call_tool", "tool_name": action.name, "arguments": dict(action.arguments)}
        if self._action:
            return {self._action: action}
        try:
            payload = json.loads(action)
        except (ValueError, RecursionError):
            payload = None
        if not isinstance(payload, dict):
            raise ToolError("Error: an action is a JSON object")
        return payload

    def _read(self, observation: Mapping[str, object]) -> str:
        if self._text and self._text in observation:
            value = observation[self._text]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown = {key: value for key, value in observation.items() if key not in ("done", "reward", "metadata")}
        return json.dumps(shown, ensure_ascii=False)

    async def _ask(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except (OSError, TimeoutError, WebSocketException) as error:
            raise InfrastructureError(f"OpenEnv {self._url}: {type(error).__name__}: {error}") from error
        except RuntimeError as error:
            if any(f"code: {code}" in str(error) for code in _REFUSED):
                raise ToolError(f"Error: {error}") from error
            raise


def _schema(tool: Mapping[str, object]) -> ToolSchema:
    """Return an MCP tool as OpenEnv lists it in the OpenAI form."""
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _read_call(observation: Mapping[str, object]) -> str:
    """Return the result of a tool as text: OpenEnv hands over the result of MCP, with its parts."""
    if error := observation.get("error"):
        return f"Error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation.get("result")
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        return "\n".join(str(part.get("text", "")) for part in result["content"] if isinstance(part, Mapping))
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
