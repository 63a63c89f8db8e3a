"""The bridge to Gymnasium: actions in words, observations as text."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from turnwise import Task
from turnwise.errors import ConfigError
from turnwise_environments.gymnasium_bridge import GymnasiumEnvironment

TASK = Task(messages=({"role": "user", "content": "Play."},), uid="task")
WORDS = {"left": 0, "down": 1, "right": 2, "up": 3}


class Parrot(gymnasium.Env):
    """Repeats a text, and ends at the text "stop"."""

    action_space = spaces.Text(20, charset=frozenset("abcdefghijklmnopqrstuvwxyz "))
    observation_space = spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action):
        return action, 1.0, action == "stop", False, {}


class Aim(gymnasium.Env):
    """Takes two numbers, and shows values of numpy."""

    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = spaces.Dict({"at": spaces.Box(-1.0, 1.0, (2,), np.float32)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"at": np.zeros(2, np.float32)}, {}

    def step(self, action):
        return {"at": action}, float(action.sum()), False, True, {}


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Register the environments of this file, once."""
    gymnasium.register("TurnwiseParrot-v0", entry_point=Parrot)
    gymnasium.register("TurnwiseAim-v0", entry_point=Aim)


def lake(**options):
    """Return the lake without slipping."""
    return GymnasiumEnvironment(id="FrozenLake-v1", make={"is_slippery": False}, **options)


def test_the_player_is_marked():
    """Colors of the environment's own text become brackets, so that the model sees where it is."""
    environment = lake(actions=WORDS, instructions="Reach G.")

    assert environment.reset(TASK, 0).text == "Reach G.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert environment.step("down").text == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"


@pytest.mark.parametrize(
    ("turn", "action"),
    [("RIGHT", 2), ("not left but down.", 1), ("up\nright", 2), ("upright, so left", 0)],
)
def test_the_last_word_is_the_action(turn, action):
    """The action is the last of the words, in any case, and never a part of a longer word."""
    assert lake(actions=WORDS).read(turn) == action


def test_a_pattern_finds_the_action():
    """A pattern restricts the part of a turn that may name the action."""
    environment = lake(actions=WORDS, pattern=r"action: (\w+)")

    assert environment.read("I could go right. Action: down, then up") == 1


def test_a_turn_without_an_action_is_no_step():
    """The model reads which actions there are, and pays `invalid_reward`."""
    environment = lake(actions=WORDS, invalid_reward=-0.1)
    environment.reset(TASK, 0)
    observation = environment.step("jump")

    assert observation.text == "No action was found. The actions are: left, down, right, up."
    assert (observation.reward, observation.metrics) == (-0.1, {"invalid_actions": 1.0})
    assert environment.step("down").text.startswith("  (Down)")


def test_reaching_the_goal_pays_and_ends():
    """Reward and end are those of Gymnasium."""
    environment = lake(actions=WORDS)
    environment.reset(TASK, 0)
    seen = [environment.step(word) for word in ("down", "down", "right", "right", "down", "right")]

    assert [(each.reward, each.ends) for each in seen] == [(0.0, False)] * 5 + [(1.0, True)]


def test_a_text_space_takes_the_turn():
    """The turn itself is the action where the action space is text; characters outside of it are refused."""
    environment = GymnasiumEnvironment(id="TurnwiseParrot-v0")

    assert environment.reset(TASK, 0).text == "hello"
    assert environment.step(" polly \n").text == "polly"
    assert environment.step("POLLY").text.startswith("This is no action.")
    assert environment.step("stop").done


def test_other_spaces_take_json():
    """Values are read and shown as JSON; a limit of time is no end by the rules."""
    environment = GymnasiumEnvironment(id="TurnwiseAim-v0")

    assert environment.reset(TASK, 0).text == '{"at": [0.0, 0.0]}'
    assert environment.step("[5, 0]").text.startswith("This is no action.")
    assert environment.step("to the left").text.startswith("The action is not JSON.")
    assert environment.step("{}").text.startswith("The action is not JSON.")
    observation = environment.step("[0.5, 0.25]")
    assert (observation.text, observation.reward) == ('{"at": [0.5, 0.25]}', 0.75)
    assert (observation.done, observation.truncated) == (False, True)


def test_an_environment_that_cannot_render_says_so():
    """`observe: render` needs an environment with a text mode."""
    with pytest.raises(ConfigError, match="cannot render text"):
        GymnasiumEnvironment(id="Blackjack-v1", observe="render")
