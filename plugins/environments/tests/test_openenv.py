"""The bridge to OpenEnv, with its real server and client; without OpenEnv these tests are skipped."""

import asyncio
import socket
import threading

import pytest

pytest.importorskip("openenv", reason="openenv is not installed here: see the README")

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

from turnwise import Resources, ToolCall
from turnwise.errors import ConfigError, InfrastructureError, ToolError
from turnwise.types import Status
from turnwise_environments import EnvironmentConfig, make_agent
from turnwise_environments.openenv_bridge import OpenEnvEnvironment
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_chat
from turnwise_testing.suites.environment import EnvironmentSuite

pytestmark = pytest.mark.filterwarnings("ignore")


class Say(Action):
    """A message to the environment."""

    message: str


class Heard(Observation):
    """The answer."""

    reply: str = ""


class Echo(Environment):
    """Repeats messages, pays their length, and ends at "stop"."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._seed = 0

    def reset(self, seed=None, episode_id=None, level="none", **kwargs):
        self._seed = seed
        return Heard(reply=f"Seed {seed}, level {level}.")

    def step(self, action, timeout_s=None, **kwargs):
        return Heard(reply=f"You said {action.message}", reward=len(action.message), done=action.message == "stop")

    @property
    def state(self):
        return State()


class Sums(MCPEnvironment):
    """Has the tool `add`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return CallToolObservation(tool_name="", result="Add.")

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return CallToolObservation(tool_name="", result="Done.", done=True, reward=1.0)

    @property
    def state(self):
        return State()


class Served:
    """A server of OpenEnv in a thread."""

    def __init__(self, app):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    def stop(self):
        """End the server and its connections."""
        self._server.should_exit = True
        self._thread.join(20)


@pytest.fixture(scope="module")
def echo():
    """The address of a server with `Echo`."""
    served = Served(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8))
    yield served.url
    served.stop()


@pytest.fixture(scope="module")
def sums():
    """The address of a server with `Sums`."""
    served = Served(create_fastapi_app(Sums, CallToolAction, CallToolObservation, max_concurrent_envs=8))
    yield served.url
    served.stop()


class TestEcho(EnvironmentSuite):
    """A text environment behind a server."""

    episode = ("hello", "stop")

    @pytest.fixture(autouse=True)
    def served(self, echo):
        """Remember the address."""
        self.url = echo

    def make_environment(self):
        """Connect to the server at the reset."""
        return OpenEnvEnvironment(url=self.url, action="message", text="reply")


def play(steps, **options):
    """Return the observations of some actions."""

    async def run():
        environment = OpenEnvEnvironment(**options)
        seen = [await environment.reset(make_task(extra={"level": "hard"}), 5)]
        try:
            seen += [await environment.step(action) for action in steps]
        finally:
            await environment.close()
        return seen, environment.tools

    return asyncio.run(run())


def test_text_actions(echo):
    """The text fills a field of the action; seed and columns reach the reset; rewards and the end come back."""
    seen, _ = play(["hi", "stop"], url=echo, action="message", text="reply", columns=["level"])

    assert [each.text for each in seen] == ["Seed 5, level hard.", "You said hi", "You said stop"]
    assert [(each.reward, each.done) for each in seen[1:]] == [(2.0, False), (4.0, True)]


def test_json_actions(echo):
    """Without a field, a turn is the whole action, and the model reads all fields."""
    seen, _ = play(['{"message": "hi"}'], url=echo)

    assert seen[1].text == '{"reply": "You said hi"}'
    for turn in ("hi", "[1]", '{"word": "hi"}'):
        with pytest.raises(ToolError, match="Error:"):
            play([turn], url=echo)


def test_tools(sums):
    """The server's MCP tools become tools of the model."""
    seen, tools = play([ToolCall(name="add", arguments={"a": 2, "b": 3})], url=sums, tools=True, text="result")

    assert [tool["function"]["name"] for tool in tools] == ["add"]
    assert tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert seen[1].text == "5"


def test_a_server_that_is_not_there():
    """The episode fails, owned by the infrastructure, with the address in its line."""
    config = EnvironmentConfig(environment="openenv", options={"url": "http://127.0.0.1:1"})
    resources = Resources(chat=probe_chat())
    probe = AgentProbe(make_agent=lambda: make_agent(config, resources), resources=resources)
    run = asyncio.run(probe.run(make_task()))

    assert (run.result.status, run.result.fault.owner) == (Status.FAILED, "infra")
    assert "OpenEnv http://127.0.0.1:1: ConnectionError" in run.result.fault.message


def test_a_lost_connection_is_no_new_session():
    """A server that restarts has lost the state, so the step fails and does not reach a fresh environment."""
    served = Served(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8))

    async def run():
        environment = OpenEnvEnvironment(url=served.url, action="message", text="reply")
        await environment.reset(make_task(), 0)
        await asyncio.to_thread(served.stop)
        try:
            await environment.step("hi")
        finally:
            await environment.close()

    with pytest.raises(InfrastructureError, match="OpenEnv http"):
        asyncio.run(run())


def test_an_address_is_needed():
    """The error names the option."""
    with pytest.raises(ConfigError, match="'url' must start with"):
        OpenEnvEnvironment(url="localhost:8000")
