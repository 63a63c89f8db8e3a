"""Servers that answer as verl's do, without verl."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def chat():
    """The demo model's chat template and tokenizer."""
    from given_servers import EXAMPLE

    from turnwise.chat import load_chat
    from turnwise.config_file import load_config

    return load_chat(load_config(EXAMPLE).model_spec())


@pytest.fixture
def servers(chat):
    """A client whose model calls the calculator once, and then answers; every third answer is wrong."""
    from given_servers import GivenServers

    return GivenServers(chat, itertools.count())
