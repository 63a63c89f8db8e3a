"""A gateway on loopback, in a thread, whose session answers as a test says."""

import asyncio
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from turnwise import ToolResult
from turnwise_chat_templates.render import HuggingFaceTokenizer
from turnwise_gateway.calls import CallRefusedError, ModelReply, Usage
from turnwise_gateway.dialects.request_body import _Scan
from turnwise_gateway.limits import CallLimits
from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory
from turnwise_testing.probes.agent import probe_resources

CLIENTS = Path(__file__).parent / "clients"
CODING_CLIS = {
    "aider": ("aider", "bin/aider"),
    "claude": ("claude_code", "node_modules/@anthropic-ai/claude-code-*/claude"),
    "codex": ("codex", "node_modules/.bin/codex"),
    "continue": ("continue_cli", "node_modules/.bin/cn"),
    "mini": ("mini_swe_agent", "bin/mini"),
    "opencode": ("opencode", "node_modules/opencode-*/bin/opencode"),
    "pi": ("pi", "node_modules/.bin/pi"),
    "qwen": ("qwen_code", "node_modules/.bin/qwen"),
}
"""The name of each coding agent in `versions.toml`, and its program; the package's own needs an installation script."""

sys.path.insert(0, str(Path(__file__).parent))  # for `session_scenarios`


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts bytes that are parsed and characters that are tokenised."""
    counts: Counter[str] = Counter()
    scan, encode = _Scan.of.__func__, HuggingFaceTokenizer.encode

    def count_scan(cls: type[_Scan], source: bytes, base: int = 0) -> _Scan:
        counts["parsed bytes"] += len(source) - base
        return scan(cls, source, base)

    def count_encode(self: HuggingFaceTokenizer, text: str) -> list[int]:
        counts["tokenised characters"] += len(text)
        return encode(self, text)

    monkeypatch.setattr(_Scan, "of", classmethod(count_scan))
    monkeypatch.setattr(HuggingFaceTokenizer, "encode", count_encode)
    return counts


def build_reply(**changes):
    """Build a reply of three tokens, with some fields changed."""
    values = {
        "id": "t1",
        "content": "Hello.",
        "usage": Usage(prompt_tokens=7, completion_tokens=3),
        "token_ids": np.arange(3, dtype=np.int32),
        "logprobs": np.array([-0.5, -1.0, -np.inf], np.float32),
    }
    return ModelReply(**{**values, **changes})


class ScriptedAnswer:
    """Tells the backend's `outcomes` whether it was confirmed, released or lost."""

    def __init__(self, reply, outcomes):
        self.reply, self._outcomes = reply, outcomes

    def confirm(self):
        self._outcomes.put("confirmed")

    def release(self):
        self._outcomes.put("released")

    def lose(self):
        self._outcomes.put("lost")


async def show_part(partial_reply, part):
    """Wait until the server has read a part of a reply."""
    was_read = asyncio.Event()

    def read():
        was_read.set()
        return part

    partial_reply.read = read
    partial_reply.changed.set()
    await was_read.wait()


class ScriptedBackend:
    """
    A session that answers with `script(call)`, a reply or an error.

    Attributes:
        script: called for each call; a reply is returned, and an exception is raised.
        tool_script: called for each call of a tool, in the same way.
        parts: returns the parts of the reply to a stream that are read before the answer.
        delay_s: seconds before each answer; on the server's own clock, so that earlier timers of the server are due.
        calls: all calls.
        refusals: calls that the server refused by the limits.
        endpoint: of the model `judge`; None if there is no such model.
        forwarded: calls that other servers have answered.
        outcomes: for each answer, `confirmed`, perhaps with `lost` after it, or `released`; for each cancelled call,
            `cancelled`.
        arrived: set when a call waits for `let_go`.
    """

    def __init__(self):
        self.script: Callable = lambda _call: build_reply()
        self.tool_script: Callable = lambda _call: ToolResult(text="5")
        self.parts: Callable = lambda _call: ()
        self.delay_s = 0.0
        self.endpoint, self.forwarded = None, []
        self.calls, self.refusals, self.outcomes, self.arrived = [], [], queue.Queue(), threading.Event()
        self._gate = None

    async def answer(self, call):
        self.calls.append(call)
        try:
            for part in self.parts(call) if call.stream else ():
                await show_part(call.partial_reply, part)
            if self._gate is not None:
                self.arrived.set()
                await self._gate.wait()
            await asyncio.sleep(self.delay_s)
            result = self.script(call)
        except asyncio.CancelledError:
            self.outcomes.put("cancelled")
            raise
        if isinstance(result, BaseException):
            raise result
        return ScriptedAnswer(result, self.outcomes)

    @property
    def limits(self):
        return CallLimits.of_context(1 << 20)

    @property
    def others(self):
        return self

    @property
    def names(self):
        return () if self.endpoint is None else ("judge",)

    def is_served(self, model):
        return model in self.names

    @property
    def has_endpoints(self):
        return self.endpoint is not None

    def find_endpoint(self, model):
        return self.endpoint if model == "judge" else None

    @asynccontextmanager
    async def forwarding(self, describe):
        try:
            yield
        finally:
            self.forwarded.append(describe())

    def note_refusal(self, call, refusal):
        self.refusals.append(refusal)

    async def count_tokens(self, call):
        self.calls.append(call)
        return 42

    def tool_schemas(self):
        return probe_resources().tool_schemas

    async def call_tool(self, call):
        self.calls.append(call)
        result = self.tool_script(call)
        if isinstance(result, BaseException):
            raise result
        return result

    def outcome(self):
        """Wait for the next outcome."""
        return self.outcomes.get(timeout=600)


class ServedGateway:
    """
    A running gateway with one session.

    Attributes:
        backend: the session.
        url: the base URL with the session in its path, without `/v1`.
        key: of the session.
    """

    def __init__(self, **options):
        self.backend, self.directory = ScriptedBackend(), SessionDirectory("tiny")
        self.key = self.directory.add("s-1", self.backend)
        self.server = GatewayServer(self.directory, ServerOptions(**options))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        self.url = self.server.url("s-1")

    async def _serve(self):
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        async with self.server:
            self._ready.set()
            await self._stopped.wait()

    def hold(self):
        """Let calls wait until `let_go`."""
        self.backend._gate = asyncio.Event()

    def let_go(self):
        self._loop.call_soon_threadsafe(self.backend._gate.set)

    def stop(self):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(60)


@pytest.fixture(scope="session")
def make_reply():
    """Builds a reply of three tokens, with some fields changed."""
    return build_reply


@pytest.fixture(scope="session")
def refused():
    """Builds the error of a call that a session refuses."""
    return CallRefusedError


@pytest.fixture
def serve():
    """Starts gateways, with options of the server, and stops them after the test."""
    served = []

    def start(**options):
        served.append(ServedGateway(**options))
        return served[-1]

    yield start
    for each in served:
        each.stop()


@pytest.fixture
def busy_server(monkeypatch):
    """Stops handlers after the last byte of a response, as a busy event loop does; they only end by a cancellation."""
    write_eof = web.StreamResponse.write_eof

    async def write_and_wait(self, data=b""):
        await write_eof(self, data)
        if self.status == 200:
            await asyncio.Event().wait()

    monkeypatch.setattr(web.StreamResponse, "write_eof", write_and_wait)


@pytest.fixture
def gateway(serve):
    """A running gateway with the default options."""
    return serve()


@pytest.fixture(scope="module")
def lasting_gateway():
    """One gateway for all examples of a property."""
    served = ServedGateway(delta_s=0)
    yield served
    served.stop()


@pytest.fixture(scope="session")
def installed():
    """Returns the folder of an installed client; skips the test if there is none."""

    def find(name):
        command = [sys.executable, str(CLIENTS / "install.py"), "--check", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(done.stderr.strip())
        return Path(done.stdout.strip())

    return find


@pytest.fixture(scope="session")
def path_of(installed):
    """Returns the folder of a coding agent's program; skips the test if it is not installed."""

    def find(cli):
        name, pattern = CODING_CLIS[cli]
        return sorted(installed(name).glob(pattern))[0].parent

    return find
