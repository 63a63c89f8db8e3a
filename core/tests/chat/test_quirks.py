"""
Quirks of messages that people have, in every chat template that the installed `trl` ships.

A prompt shows each text of its messages, in the same or in an equal form, or it is refused with the place of a message.
"""

import pytest
from quirks import QUIRKS, TOOL, USABLE, count_shown
from real_templates import TEMPLATES, chat_of, chat_with

from turnwise_testing.vocabularies import VOCABULARIES, missing_package

FAMILIES = ("deepseekv3", "glm4moe", "gptoss", "llama3_1", "qwen2_5", "qwen3", "qwen3_6")
"""A tokenizer of a real size is copied for each, which takes about a second."""

pytestmark = pytest.mark.skipif(not TEMPLATES.is_dir(), reason="trl is not installed")


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("quirk", QUIRKS)
def test_no_template_loses_a_text(quirk, tools):
    """The prompt has each word of the messages and no word None, or one line names a message, a call or the tools."""
    assert count_shown(((name, chat_of(name)) for name in USABLE), quirk, tools)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_no_template_loses_a_text_with_a_real_vocabulary(vocabulary):
    """Merges change nothing: all quirks, with tools and without, in templates of several families."""
    if reason := missing_package(vocabulary):
        pytest.skip(f"{vocabulary} {reason}")
    chats = [(name, chat_with(vocabulary, name)) for name in FAMILIES]

    for tools in ((), (TOOL,)):
        for quirk in QUIRKS:
            count_shown(chats, quirk, tools)
