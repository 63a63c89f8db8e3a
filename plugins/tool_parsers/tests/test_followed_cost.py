"""To follow the arguments of a call costs a bounded number of looks at each character, however it is cut."""

import pytest

from turnwise_tool_formats import following, json_stream
from turnwise_tool_parsers import python_stream

LONG = "a line of text, about as long as others, which ends here; " * 600
CASES = {
    "hermes": {"text": LONG, "n": 1},
    "llama3_json": {"more": [LONG, {"deep": LONG}]},
    "qwen3_coder": {"text": LONG, "list": [LONG]},
    "glm45": {"text": LONG},
    "llama4_pythonic": {"text": LONG, "more": [LONG, 1, {"a": LONG}]},
    "gpt_oss": {"text": LONG},
    "kimi_k2": {"text": LONG},
    "mistral_v13": {"text": LONG},
    "mistral": {"text": LONG},
    "deepseek_v3": {"text": LONG},
}
CHARS_OF_TOKEN = 4


class Counted:
    """A pattern that counts the characters at which it looks."""

    def __init__(self, pattern, looks):
        self.pattern, self.looks = pattern, looks

    def match(self, text, at=0, *rest, **options):
        found = self.pattern.match(text, at, *rest, **options)
        self.looks.append(found.end() - at + 1 if found else 1)
        return found

    def search(self, text, at=0, *rest, **options):
        found = self.pattern.search(text, at, *rest, **options)
        self.looks.append((found.end() if found else len(text)) - at)
        return found


@pytest.fixture
def looks(monkeypatch):
    """The numbers of characters at which the patterns of followers have looked, one for each use."""
    found = []
    allow_partial = following._allow_partial
    monkeypatch.setattr(following, "_allow_partial", lambda pattern: Counted(allow_partial(pattern), found))
    for module, names in ((following, ["_SPACE"]), (json_stream, ["_SPACE", "_IN_STRING", "_SCALAR"])):
        for name in names:
            monkeypatch.setattr(module, name, Counted(getattr(module, name), found))
    plain = {quote: Counted(pattern, found) for quote, pattern in python_stream._PLAIN.items()}
    monkeypatch.setattr(python_stream, "_PLAIN", plain)
    return found


@pytest.mark.parametrize("turn", CASES)
def test_each_character_is_read_a_few_times(turn, render, parser_for, resources_of, looks, monkeypatch):
    """8,000 tokens cost as much for each as 80; the call is read as a whole once."""
    calls = [("write", CASES[turn])]
    resources = resources_of(*calls)
    text = render(turn, "So: ", calls)
    checks = []
    check = following.Follower.check
    monkeypatch.setattr(following.Follower, "check", lambda self, read: (checks.append(read), check(self, read)))
    stream = parser_for(turn, resources).follow([tool.schema for tool in resources.tools.values()])

    cuts = range(0, len(text), CHARS_OF_TOKEN)
    sizes = [sum(len(call.arguments) for call in stream.read(text[:cut]).calls) for cut in cuts]
    whole = stream.read(text, is_whole=True)

    assert whole.calls[0].is_complete
    assert len(checks) == 1
    assert sum(looks) < 4 * len(text) + 40 * len(cuts)
    assert max(sizes) > len(LONG) or turn == "mistral"
