"""
Starts `rllm-model-gateway` with an upstream that answers at once; measures its CPU time, or runs our suite against it.

    python benchmarks/gateway_peer.py .venv-rllm/bin/python      # the conformance suite of gateways
    python benchmarks/gateway_cost.py --peer .venv-rllm/bin/python

The environment is made by `python -m venv .venv-rllm && .venv-rllm/bin/pip install rllm-model-gateway==0.1.0`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from turnwise_testing import GatewayEndpoint, GatewaySuite

AT_ONCE = 8
BYTES_PER_TOKEN = 3.4
PEER = "TURNWISE_PEER_PYTHON"
"""Variable with the Python of the peer, for the process of the suite."""


def read_version(python: Path) -> str:
    """Return the name and version of the peer in an environment."""
    code = "from importlib.metadata import version; print(version('rllm-model-gateway'))"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return f"rllm-model-gateway {found.stdout.strip()}"


def find_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process listens."""
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"{process.args!r} does not listen")


@contextmanager
def start_peer(python: Path, store: str = "memory") -> Iterator[tuple[int, int]]:
    """Run the peer and its upstream; yield the peer's port and the id of its process."""
    upstream_port, port = find_port(), find_port()
    peer = [str(python), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port), "--store", store]
    peer += ["--worker", f"http://127.0.0.1:{upstream_port}", "--log-level", "warning"]
    upstream = subprocess.Popen([sys.executable, __file__, "--upstream", str(upstream_port)])
    try:
        wait_for(upstream_port, upstream)
        process = subprocess.Popen(peer)
        try:
            wait_for(port, process)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()
    finally:
        upstream.terminate()
        upstream.wait()


def write_reply(num_prompt_tokens: int, *, stream: bool) -> bytes:
    """Return a reply of 100 tokens as vLLM writes it when it returns token ids."""
    entries = [{"token": "word ", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in range(100)]
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": list(range(100)),
        "logprobs": {"content": entries},
    }
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 100, "total_tokens": num_prompt_tokens + 100}
    head: dict[str, Any] = {"id": "chatcmpl-1", "created": 1, "model": "policy", "usage": usage}
    head["prompt_token_ids"] = list(range(num_prompt_tokens))
    message = {"role": "assistant", "content": "word " * 100}
    if not stream:
        return json.dumps(head | {"object": "chat.completion", "choices": [choice | {"message": message}]}).encode()
    chunk = head | {"object": "chat.completion.chunk", "choices": [choice | {"delta": message}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"


async def serve_upstream(port: int) -> None:
    """Answer chat completions at once without reading them, checks of health and the list of models."""
    from aiohttp import web

    replies: dict[tuple[int, bool], bytes] = {}

    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path == "/health":
            return web.Response()
        if request.path.endswith("/models"):
            return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})
        if request.path != "/v1/chat/completions":
            return web.json_response({"error": {"message": "there is no such route"}}, status=404)
        stream = b'"stream": true' in body or b'"stream":true' in body
        key = (int(len(body) / BYTES_PER_TOKEN), stream)
        if key not in replies:
            replies[key] = write_reply(key[0], stream=stream)
        return web.Response(body=replies[key], content_type="text/event-stream" if stream else "application/json")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def write_body(num_bytes: int) -> bytes:
    """Return a request of about some size, with the messages of a long conversation."""
    turn = [
        {"role": "assistant", "content": "word " * 100},
        {"role": "tool", "tool_call_id": "a", "content": "x" * 1500},
    ]
    count = max(1, num_bytes // len(json.dumps(turn)))
    messages = [{"role": "user", "content": "Hi."}, *turn * count]
    return json.dumps({"model": "policy", "messages": messages}).encode()


async def send(port: int, body: bytes, num_calls: int) -> None:
    """Send calls over some connections at once, each in a separate session."""
    import aiohttp

    async def call_in_turn(number: int, session: aiohttp.ClientSession) -> None:
        url = f"http://127.0.0.1:{port}/sessions/s{number}/v1/chat/completions"
        for _ in range(num_calls // AT_ONCE):
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                response.raise_for_status()
                await response.read()

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for number in range(AT_ONCE):
            group.create_task(call_in_turn(number, session))


def measure(port: int, pid: int, sizes: list[int], num_calls: int = 128) -> list[float]:
    """Return the CPU milliseconds per call of the peer's process, for each size of a request."""
    found, process = [], psutil.Process(pid)
    for size in sizes:
        before = process.cpu_times()
        asyncio.run(send(port, write_body(size), num_calls))
        after = process.cpu_times()
        found.append(1e3 * (after.user + after.system - before.user - before.system) / num_calls)
    return found


class TestPeer(GatewaySuite):
    """The conformance suite of gateways, with the peer as the gateway."""

    @pytest.fixture(scope="class")
    def endpoint(self) -> Iterator[GatewayEndpoint]:
        with start_peer(Path(os.environ[PEER])) as (port, _):
            yield GatewayEndpoint(f"http://127.0.0.1:{port}/sessions/suite", "key")


def main() -> None:
    """Run the suite against the peer, and print a line for each check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, nargs="?", help="of a virtual environment with rllm-model-gateway")
    parser.add_argument("--upstream", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upstream is not None:
        asyncio.run(serve_upstream(options.upstream))
        return
    if options.python is None or not options.python.exists():
        parser.error("give the Python of a virtual environment with rllm-model-gateway")
    os.environ[PEER] = str(options.python)
    pytest.main([__file__, "-q", "-rA", "--tb=no", "-p", "no:cacheprovider", "--override-ini", "addopts="])


if __name__ == "__main__":
    main()
