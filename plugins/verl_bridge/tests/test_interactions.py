"""verl's interactions run from verl's own YAML files."""

import asyncio

import pytest
import verl_like

from turnwise import Task
from turnwise.errors import ConfigError, DataError
from turnwise_testing import InteractionSuite
from turnwise_testing.checks.interaction import InteractionProbe
from turnwise_verl_bridge import make_interaction
from turnwise_verl_bridge.config import VerlInteractionConfig

RIDDLE = """
interaction:
  - name: "riddle"
    class_name: "verl_like.RiddleInteraction"
    config: {}
  - class_name: "verl_like.BareInteraction"
    config: {}
"""


def task(**kwargs):
    """Return a task with verl's `interaction_kwargs`."""
    return Task(
        messages=({"role": "user", "content": "2+2?"},),
        uid="task",
        ground_truth="4",
        extra={"extra_info": {"interaction_kwargs": kwargs}},
    )


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file of interactions and returns its config."""

    def write(text):
        path = tmp_path / "interactions.yaml"
        path.write_text(text, encoding="utf-8")
        return VerlInteractionConfig(file=path, modules=("verl_like",))

    return write


class TestVerlInteraction(InteractionSuite):
    """The standard suite for user simulators, with a file of verl's."""

    entry_point = "verl_bridge"
    module = "turnwise_verl_bridge"
    registered = "verl"

    @pytest.fixture
    def config(self, file):
        """Two interactions."""
        return file(RIDDLE)

    @pytest.fixture
    def probe(self, config):
        """A task that names one of them."""
        return InteractionProbe(make_interaction=lambda: make_interaction(config, None), task=task(name="riddle"))


def converse(config, of, *answers):
    """Return the replies to some answers."""

    async def run():
        interaction = make_interaction(config, None)
        session = await interaction.create(of)
        replies = [await interaction.respond(session, [{"role": "assistant", "content": each}]) for each in answers]
        await interaction.release(session)
        return replies

    return asyncio.run(run())


def test_the_task_chooses_the_interaction(file):
    """`interaction_kwargs` reach it; its score is the reward of the turn, and it is ended with its id."""
    replies = converse(file(RIDDLE), task(name="riddle", hint="even"), "5", "4")

    assert [(each.content, each.reward, each.should_terminate) for each in replies] == [
        ("Wrong. Hint: even", 0.0, False),
        ("Right.", 1.0, True),
    ]
    assert verl_like.RiddleInteraction.finalized[-1] == "4"


def test_an_end_without_an_argument_works(file):
    """verl's base class ends without an id; the name of a class is the name of its interaction."""
    converse(file(RIDDLE), task(name="bare"), "4")

    assert verl_like.RiddleInteraction.finalized[-1] == "bare"


def test_a_task_without_a_name_is_the_datas_fault(file):
    """With several interactions, a task that names none cannot be played."""
    with pytest.raises(DataError, match=r"interaction_kwargs\.name is None, expected one of riddle, bare"):
        converse(file(RIDDLE), task(), "4")


def test_two_interactions_with_one_name_are_refused(file):
    """The second one would never be asked."""
    with pytest.raises(ConfigError, match="two interactions are named 'riddle'"):
        make_interaction(file(RIDDLE.replace("BareInteraction", "RiddleInteraction")), None)
