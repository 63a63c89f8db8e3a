"""The bridge to TextArena, with its real games; without TextArena these tests are skipped."""

import pytest

pytest.importorskip("textarena", reason="textarena is not installed here: see the README")

from turnwise.errors import ConfigError
from turnwise_environments.textarena_bridge import TextArenaEnvironment
from turnwise_testing.probes.agent import make_task
from turnwise_testing.suites.environment import EnvironmentSuite

pytestmark = pytest.mark.filterwarnings("ignore")


class TestBandit(EnvironmentSuite):
    """The game of buttons with rewards."""

    episode = ("I press [red]",) * 20 + ("[blue]",)

    def make_environment(self):
        """Return a game whose id has wrappers, which are removed."""
        return TextArenaEnvironment(id="Bandit-v0")


def test_the_model_reads_only_what_is_new():
    """An observation has neither the rules again nor the model's own move."""
    environment = TextArenaEnvironment(id="Bandit-v0")
    rules = environment.reset(make_task(), 3).text
    answer = environment.step("[red]").text

    assert "room with 5 buttons" in rules
    assert answer.startswith("You pressed the red button")
    assert "room with 5 buttons" not in answer
    assert "[red]" not in answer


def test_an_unknown_game_is_refused():
    """The error names the game."""
    with pytest.raises(ConfigError, match="TextArena has no game 'Wordl-v0'"):
        TextArenaEnvironment(id="Wordl-v0")
