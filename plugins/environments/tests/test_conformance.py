"""The agent and the environments of this package pass the conformance suites."""

import pytest

from turnwise import ToolCall
from turnwise_environments.config import EnvironmentConfig
from turnwise_environments.guess_number import GuessNumber
from turnwise_environments.gymnasium_bridge import GymnasiumEnvironment
from turnwise_environments.protocol import Environment, Observation
from turnwise_plain_functions import tool
from turnwise_testing import AgentSuite
from turnwise_testing.suites.environment import EnvironmentSuite


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Adder:
    """An environment with a tool and a number that the model has to reach; `step` is async."""

    repeatable = True
    tools = (tool(add).schema,)

    def __init__(self, goal: int = 5) -> None:
        self._goal, self._last = goal, 0

    def reset(self, task, seed):
        """Return the goal as a string."""
        return f"Reach {self._goal}."

    async def step(self, action):
        """Add; a text ends the game."""
        if not isinstance(action, ToolCall):
            return Observation(reward=1.0 if self._last == self._goal else 0.0, done=True)
        self._last = action.arguments["a"] + action.arguments["b"]
        return Observation(text=str(self._last), reward=0.25, metrics={"additions": 1})

    async def close(self):
        """Free nothing."""


class TestEnvironmentAgent(AgentSuite):
    """The agent with a text environment."""

    entry_point = "environments"
    module = "turnwise_environments"
    registered = "environment"

    @pytest.fixture
    def config(self):
        """The guessing game."""
        return EnvironmentConfig(environment="guess_number", options={"highest": 50}, max_turns=4)


class TestEnvironmentAgentWithTools(TestEnvironmentAgent):
    """The agent with an environment that has tools and async methods."""

    @pytest.fixture
    def config(self):
        """The adder, under a name as a config has it."""
        return EnvironmentConfig(environment=f"{__name__}:Adder", system_prompt="Use the tools.")


class TestGuessNumber(EnvironmentSuite):
    """The guessing game; 7 is the number of seed 0."""

    episode = ("I guess 3", "9", "7")

    def make_environment(self):
        """Ten numbers, five guesses."""
        return GuessNumber()


class TestAdder(EnvironmentSuite):
    """An environment with a tool."""

    episode = (ToolCall(name="add", arguments={"a": 2, "b": 3}), "done")

    def make_environment(self):
        """The goal 5."""
        return Adder()


class TestFrozenLake(EnvironmentSuite):
    """An environment of Gymnasium with other texts."""

    episode = ("go down", "down", "right", "right", "down", "then right!")

    def make_environment(self):
        """The lake without slipping."""
        words = {"left": 0, "down": 1, "right": 2, "up": 3}
        return GymnasiumEnvironment(id="FrozenLake-v1", make={"is_slippery": False}, actions=words)


class TestBlackjack(EnvironmentSuite):
    """An environment of Gymnasium whose observations are values."""

    episode = ("0",)

    def make_environment(self):
        """A hand of cards."""
        return GymnasiumEnvironment(id="Blackjack-v1")


@pytest.mark.parametrize("made", [GuessNumber(), Adder()])
def test_the_examples_fulfil_the_protocol(made):
    """Environments of both forms are instances of the protocol."""
    assert isinstance(made, Environment)
