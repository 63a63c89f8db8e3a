"""The conformance suite of chats: `turnwise_testing.checks.chat`, one test each."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.chat import CHAT_CHECKS, ChatProbe, tokenizer_resources
from turnwise_testing.suites.plugin import PluginSuite


class ChatSuite(PluginSuite):
    """
    The conformance suite of chats. A plugin's whole file::

        class TestJinja(ChatSuite):
            entry_point = "chat_templates"
            module = "turnwise_chat_templates.plugin"
            registered = "jinja"

    The chat is built with `byte_tokenizer`, which has ChatML's tokens. May be overridden: `config`, `resources`, whose
    model has the family's own tokenizer (`tokenizer_resources`), and `probe`, which tells how the family writes a turn.
    """

    hook = "register_chats"
    checks = CHAT_CHECKS

    @pytest.fixture
    def resources(self, tmp_path: Path) -> Resources:
        """Resources with a model's directory; may be overridden."""
        return tokenizer_resources(tmp_path)

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> ChatProbe:
        """The probe of the chat; may be overridden."""
        factory = self.entry().factory
        return ChatProbe(make_chat=lambda: factory(config, resources))
