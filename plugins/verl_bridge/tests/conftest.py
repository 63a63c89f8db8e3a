"""Fixtures: the demo model's chat template, and scripted servers in place of verl's."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def chat():
    """Return the demo model's chat template and tokenizer."""
    from scripted_servers import EXAMPLE

    from turnwise.config.file import load_config
    from turnwise_chat_templates import load_chat

    return load_chat(load_config(EXAMPLE).model_spec())


@pytest.fixture
def servers(chat):
    """Return a client whose model calls the calculator once and then answers; every third answer is wrong."""
    from scripted_servers import ScriptedServers

    return ScriptedServers(chat, itertools.count())
