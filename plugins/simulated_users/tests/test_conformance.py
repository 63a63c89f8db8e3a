"""Both users pass the conformance suite of user simulators."""

import pytest

from turnwise import Resources
from turnwise_simulated_users.config import ModelUserConfig, ScriptedUserConfig
from turnwise_testing import InteractionSuite
from turnwise_testing.probes.agent import probe_chat


class EchoJudge:
    """Asks about the last message, and ends after the third."""

    async def ask(self, messages, sampling=None):
        """Reply to a conversation."""
        num = sum(message["role"] == "assistant" for message in messages)
        return f"Why {messages[-1]['content']!r}?" if num < 3 else "###STOP###"


class TestScriptedUser(InteractionSuite):
    """The suite with three messages."""

    entry_point = "simulated_users"
    module = "turnwise_simulated_users"
    registered = "scripted_user"

    @pytest.fixture
    def config(self):
        """Three messages."""
        return ScriptedUserConfig(replies=("Why?", "Are you sure?", "Thanks."), stop_when=("do not know",))


class TestModelUser(InteractionSuite):
    """The suite with a scripted judge."""

    entry_point = "simulated_users"
    module = "turnwise_simulated_users"
    registered = "model_user"

    @pytest.fixture
    def config(self):
        """A goal for all tasks."""
        return ModelUserConfig(goal="You want to know the answer.")

    @pytest.fixture
    def resources(self):
        """Resources of a run with a judge."""
        return Resources(chat=probe_chat(), judge=EchoJudge())
