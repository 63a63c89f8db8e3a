"""The parsers with vocabularies that have merges: a tag may be several ids, and one id may reach over its end."""

from functools import cache

import numpy as np
import pytest
from attrs import evolve

from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import CHATML, SPECIAL_TOKENS
from turnwise_testing.inputs.vocabularies import VOCABULARIES, missing_package, vocabulary_tokenizer

CALLS = [
    ("add", {"a": 1, "b": -2.5, "c": None, "d": True}),
    ("write_file", {"path": "/tmp/ä 世界.txt", "text": "def f():\n    return \"</x>\" + '\\\\' * 3  # 🙂\n\n"}),
    ("nothing", {}),
    ("deep", {"list": [[1], {"k": ["v", {}]}], "key-with-dash": "12345678901234567890"}),
]
CONTENT = "Let me see: don't  guess.\n"

pytestmark = pytest.mark.slow


@cache
def chat_with(vocabulary):
    tokenizer = vocabulary_tokenizer(vocabulary, CHATML, SPECIAL_TOKENS, eos_token="<|im_end|>")
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ids_of_calls(vocabulary, turn, render, parser_for, resources_of):
    """Calls come back from ids, in any split, and no beginning of the ids has a call that the turn lacks."""
    if reason := missing_package(vocabulary):
        pytest.skip(f"{vocabulary} {reason}")
    if vocabulary == "mistral_v3" and turn.startswith("deepseek"):
        pytest.skip("this vocabulary writes a space as the character that DeepSeek's tags have in the place of a space")
    chat = chat_with(vocabulary)
    calls = [call for call in CALLS if turn != "llama4_pythonic" or "key-with-dash" not in call[1]]
    parser = parser_for(turn, evolve(resources_of(*calls), chat=chat))
    text = render(turn, CONTENT, calls)
    ids = chat.tokenizer.encode(text)
    pieces = [each for char in text for each in chat.tokenizer.encode(char)]
    assert chat.tokenizer.decode(ids) == text

    content, found = parser.parse(np.array([*ids, chat.stop_token_ids[0]], np.int32))

    assert [(call.name, call.arguments, call.error) for call in found] == [(*call, "") for call in calls]
    assert content.strip() == CONTENT.strip()
    if vocabulary != "mistral_v3":  # a character by itself has a space before it
        assert parser.parse(np.array(pieces, np.int32)) == (content, found)
    for size in range(len(ids)):
        cut = [call for call in parser.parse(np.array(ids[:size], np.int32))[1] if not call.error]
        assert cut == list(found[: len(cut)])
