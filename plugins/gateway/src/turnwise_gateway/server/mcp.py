"""
The tools of a session as a server of the Model Context Protocol, over streamable HTTP.

Written by hand: the server of the package `mcp` is an ASGI application with some thirty packages under it, and an
adapter to aiohttp would be as long as the four methods that tools need. The server keeps no state between messages: the
key names the episode, whose tool sessions have it, so all clients of an episode act on one environment.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Final

from turnwise import ToolCall
from turnwise.media import Picture
from turnwise.showing import split_parts
from turnwise.threads import in_thread
from turnwise.types import JsonDict, JsonObject, ToolSchema
from turnwise_gateway.calls import CallRefusedError, SessionBackend
from turnwise_gateway.dialects.strict_json import read_json
from turnwise_gateway.limits import MAX_INLINE_BYTES, CallLimits

VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol that begin with `initialize`, the newest first."""

_PARSE_ERROR: Final = -32700
_INVALID_REQUEST: Final = -32600
_NO_METHOD: Final = -32601
_INVALID_PARAMS: Final = -32602
_FAILED: Final = -32000
_NO_VERSION: Final = -32022


class _RpcError(Exception):
    """A request without a result."""

    def __init__(self, code: int, message: str, data: JsonObject | None = None) -> None:
        super().__init__(message)
        self.code, self.data = code, data


async def answer_message(
    body: bytes, headers: Mapping[str, str], backend: SessionBackend
) -> tuple[int, JsonObject | None]:
    """
    Return the status and the body of the response to one message; a notification has none.

    Args:
        body: a request, a notification or a response in JSON-RPC.
        headers: of the HTTP request.
        backend: has the tools.
    """
    request_id: object = None
    try:
        message = await _read_message(body, backend.limits)
        if "id" not in message or "method" not in message:
            return 202, None  # this server sends no requests, so a response has no effect, nor has a notification
        request_id = _read_id(message)
        _check_version(headers)
    except _RpcError as error:
        return 400, _write_error(request_id, error)
    try:
        result = await _answer(message, backend)
    except _RpcError as error:
        return 200, _write_error(request_id, error)
    except CallRefusedError as refusal:
        return 200, _write_error(request_id, _RpcError(_FAILED, f"{refusal.kind}: {refusal.message}"))
    return 200, {"jsonrpc": "2.0", "id": request_id, "result": result}


async def _read_message(body: bytes, limits: CallLimits) -> dict[str, object]:
    try:
        limits.check_values(body)
        message = read_json(body) if len(body) <= MAX_INLINE_BYTES else await in_thread(partial(read_json, body), {})
    except CallRefusedError as error:
        is_list = body.lstrip()[:1] == b"["
        code, text = (_INVALID_REQUEST, "batches are not served") if is_list else (_PARSE_ERROR, error.message)
        raise _RpcError(code, text) from error
    if message.get("jsonrpc") != "2.0":
        raise _RpcError(_INVALID_REQUEST, "jsonrpc must be '2.0'")
    if not isinstance(message.get("method", ""), str):
        raise _RpcError(_INVALID_REQUEST, "method must be a string")
    if "method" not in message and not message.keys() & {"result", "error"}:
        raise _RpcError(_INVALID_REQUEST, "the message has neither a method nor a result")
    return message


def _read_id(message: JsonObject) -> str | int:
    request_id = message["id"]
    if isinstance(request_id, bool) or not isinstance(request_id, str | int):
        raise _RpcError(_INVALID_REQUEST, "id must be a string or an integer")
    return request_id


def _check_version(headers: Mapping[str, str]) -> None:
    asked = headers.get("MCP-Protocol-Version")
    if asked is not None and asked not in VERSIONS:
        text = f"the server speaks {', '.join(VERSIONS)}"
        raise _RpcError(_NO_VERSION, text, {"supported": list(VERSIONS), "requested": asked})


async def _answer(message: JsonObject, backend: SessionBackend) -> JsonObject:
    """Return the result of a request."""
    method, params = str(message["method"]), message.get("params", {})
    answer = _METHODS.get(method)
    if answer is None:
        raise _RpcError(_NO_METHOD, f"there is no method {method[:100]!r}")
    if not isinstance(params, dict):
        raise _RpcError(_INVALID_PARAMS, "params must be an object")
    return await answer(params, backend)


async def _initialize(params: JsonObject, _backend: SessionBackend) -> JsonObject:
    asked = _text(params, "protocolVersion")
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "turnwise", "version": version("turnwise-gateway")},
    }


async def _ping(_params: JsonObject, _backend: SessionBackend) -> JsonObject:
    return {}


async def _list_tools(params: JsonObject, backend: SessionBackend) -> JsonObject:
    if params.get("cursor") is not None:
        raise _RpcError(_INVALID_PARAMS, "the list has one page")
    return {"tools": [_describe(schema["function"]) for schema in backend.tool_schemas()]}


async def _call_tool(params: JsonObject, backend: SessionBackend) -> JsonObject:
    name, arguments = _text(params, "name"), params.get("arguments")
    if not isinstance(arguments, dict | None):
        raise _RpcError(_INVALID_PARAMS, "arguments must be an object")
    result = await backend.call_tool(ToolCall(name=name, arguments=arguments or {}))
    content = [_write_block(part) for part in split_parts(result)] or [_write_block("")]
    return {"content": content, "isError": result.error}


def _write_block(part: str | Picture) -> JsonObject:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image", "data": b64encode(part.data).decode("ascii"), "mimeType": part.media_type}


_METHODS: Final[Mapping[str, Callable[[JsonObject, SessionBackend], Awaitable[JsonObject]]]] = {
    "initialize": _initialize,
    "ping": _ping,
    "tools/list": _list_tools,
    "tools/call": _call_tool,
}


def _describe(function: ToolSchema) -> JsonObject:
    parameters: JsonObject = function.get("parameters") or {}
    schema = {"type": "object", "properties": {}, **parameters}
    return {"name": function["name"], "description": function.get("description") or "", "inputSchema": schema}


def _text(params: JsonObject, name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str):
        raise _RpcError(_INVALID_PARAMS, f"{name} must be a string")
    return value


def _write_error(request_id: object, error: _RpcError) -> JsonObject:
    described: JsonDict = {"code": error.code, "message": str(error)}
    if error.data is not None:
        described["data"] = error.data
    return {"jsonrpc": "2.0", "id": request_id, "error": described}
