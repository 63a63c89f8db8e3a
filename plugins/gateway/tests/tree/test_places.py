"""Tests of the tree of conversations."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.tree.messages import tools_key
from turnwise_gateway.tree.places import ConversationTree, last_turn, without_empty

USER = {"role": "user", "content": "Question?"}
RESULT = {"role": "tool", "tool_call_id": "aaaaaaaaa", "content": "5"}
CALL = {
    "id": "aaaaaaaaa",
    "type": "function",
    "function": {"name": "add", "arguments": '{"b":  1.0, "a": "\\u00e9"}'},
}
TURN = {
    "role": "assistant",
    "content": " Let me look.\n",
    "reasoning_content": "I must add.\n",
    "tool_calls": [CALL],
}
LISTED = {**CALL, "function": {"name": "add", "arguments": {"b": 1.0, "a": "é"}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"properties": {"a": {"type": "string"}, "exact": {"type": "boolean", "default": False}}},
        },
    }
]


def with_arguments(text):
    return [{**CALL, "function": {**CALL["function"], "arguments": text}}]


def grow(*turns, stops=()):
    """Return a tree with a question and turns of the model, each answered, and the last place."""
    tree = ConversationTree()
    place = tree.add(tree.root("[]"), [USER])
    place.points.append("before")
    for turn in turns:
        place = tree.add_turn(place, turn, stops)
        place.points.append("after")
    return tree, place


def echoed(tree, *echo):
    """Return whether a request with an echo of the turn, and a tool result, continues the turn; and the tolerances."""
    location = tree.locate("[]", [USER, *echo, RESULT])
    found = last_turn(location.place) is not None and list(location.rest) == [RESULT]
    return found, set(tree.note(location))


ECHOES = {
    # Rule, client, echo, tolerances; section 5.2 of the measurements of real clients.
    "R0 openai-python": ([TURN], set()),
    "R0 mini-swe-agent": ([TURN], set()),
    "R1 openai-python stream": ([{**TURN, "type": None}], set()),
    "R2 pydantic-ai": ([{**TURN, "tool_calls": with_arguments('{"b":1.0,"a":"é"}')}], {"arguments"}),
    "R2 AI SDK": ([{**TURN, "tool_calls": with_arguments('{"a":"é","b":1}')}], {"arguments"}),
    "R2 Claude Code": ([{**TURN, "tool_calls": with_arguments('{"a": "é", "b": 1.0}')}], {"arguments"}),
    "R3 OpenAI Agents": (
        [{"role": "assistant", "content": TURN["content"], "tool_calls": [CALL]}],
        {"reasoning_dropped"},
    ),
    "R3 LangChain": (
        [
            {
                "role": "assistant",
                "content": TURN["content"],
                "tool_calls": with_arguments(json.dumps(json.loads(CALL["function"]["arguments"]))),
            }
        ],
        {"reasoning_dropped", "arguments"},
    ),
    "R4 Qwen Code": (
        [
            {
                **TURN,
                "content": "Let me look.",
                "reasoning_content": "I must add.",
                "tool_calls": with_arguments('{"b":1,"a":"é"}'),
            }
        ],
        {"whitespace", "arguments"},
    ),
    "R4 opencode after a cut": ([{"role": "assistant", "content": ""}, TURN], {"empty_message"}),
    "R4 empty after the turn": ([TURN, {"role": "assistant", "content": None}], {"empty_message"}),
    "beyond R4: pydantic-ai Responses": (
        [
            {"role": "assistant", "content": "<think>\nI must add.\n</think>"},
            {"role": "assistant", "content": TURN["content"], "tool_calls": with_arguments('{"b":1.0,"a":"é"}')},
        ],
        {"empty_message", "reasoning_dropped", "arguments"},
    ),
    "beyond R4: think text": (
        [{"role": "assistant", "content": "<think>\nI must add.\n</think>Let me look.", "tool_calls": [CALL]}],
        {"think_text"},
    ),
    "later: Semantic Kernel": (
        [{"role": "assistant", "tool_calls": [CALL]}],
        {"reasoning_dropped", "text_dropped"},
    ),
    "later: CrewAI": (
        [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
        {"reasoning_dropped", "text_dropped"},
    ),
    "later: LiteLLM, streams of Messages": (
        [{**TURN, "reasoning_content": TURN["reasoning_content"] * 2}],
        {"reasoning_repeated"},
    ),
    "beyond R4: smolagents": (
        [{"role": "assistant", "content": f"Let me look.\nCalling tools:\n{[LISTED]}"}],
        {"reasoning_dropped", "calls_as_text", "whitespace"},
    ),
}


@pytest.mark.parametrize("name", ECHOES)
def test_echoes_of_real_clients_are_recognised(name):
    """An echo in the form of each measured client continues its turn, and each tolerance is counted once."""
    echo, expected = ECHOES[name]
    tree, _ = grow(TURN)

    assert (True, expected) == echoed(tree, *copy.deepcopy(echo))
    again, repeated = echoed(tree, *copy.deepcopy(echo))
    assert again
    assert repeated <= {"empty_message"}


NUM_CALLS = {"R0": 12, "R1": 16, "R2": 18, "R3": 10, "R4": 3, "beyond R4": 10}
"""How many of 69 measured calls need each rule and no later one, after section 5.2."""

RULES = {
    "R1": set(),
    "R2": {"arguments"},
    "R3": {"arguments", "reasoning_dropped"},
    "R4": {"arguments", "reasoning_dropped", "whitespace", "empty_message"},
    "all": {"arguments", "reasoning_dropped", "whitespace", "empty_message", "think_text", "calls_as_text"},
}
"""The tolerances of each rule and those before it."""


def test_the_measured_calls_need_no_wider_rule():
    """The forms of each rule are recognised with its tolerances, so 28, 46, 56, 59 and all of 69 calls are."""

    def needed(rule):
        """Return the tolerances that the forms of a rule need, None if one of them is another turn."""
        found = [echoed(grow(TURN)[0], *copy.deepcopy(ECHOES[name][0])) for name in ECHOES if name.startswith(rule)]
        assert found
        return set().union(*(used for _, used in found)) if all(known for known, _ in found) else None

    needs = {rule: needed(rule) for rule in NUM_CALLS}
    known = {
        name: sum(NUM_CALLS[rule] for rule, used in needs.items() if used is not None and used <= allowed)
        for name, allowed in RULES.items()
    }
    assert {"R1": 28, "R2": 46, "R3": 56, "R4": 59, "all": 69} == known


@pytest.mark.parametrize(
    "echo",
    [
        {**TURN, "content": " Let me lock.\n"},
        {**TURN, "tool_calls": with_arguments('{"a": "e", "b": 1}')},
        {**TURN, "tool_calls": with_arguments('{"a": "é", "b": 2}')},
        {**TURN, "tool_calls": [CALL, CALL]},
        {**TURN, "tool_calls": []},
        {**TURN, "reasoning_content": "I must subtract."},
        {"role": "assistant", "tool_calls": with_arguments('{"a": "é", "b": 2}')},
        {"role": "assistant", "tool_calls": [CALL, CALL]},
        {**TURN, "role": "user"},
        {"role": "user", "content": f"Calling tools:\n{[CALL]}"},
    ],
    ids=[
        "text",
        "value",
        "number",
        "more calls",
        "no calls",
        "reasoning",
        "value alone",
        "more calls alone",
        "role",
        "smolagents",
    ],
)
def test_a_changed_echo_is_another_turn(echo):
    """A changed letter, value or reasoning is not the turn of the model."""
    tree, _ = grow(TURN)

    assert not echoed(tree, echo)[0]


@pytest.mark.parametrize(
    ("listed", "known"),
    [("[0, 1]", True), ("[1, 0]", True), ("[0, 0]", False), ("[0]", False), ("[0, 1, 1]", False)],
)
def test_calls_as_text_may_have_another_order(listed, known):
    """smolagents sorts the calls of a turn by their ids; other calls are another turn."""
    values = [LISTED, {**LISTED, "id": "bbbbbbbbb", "function": {"name": "drop", "arguments": "everything"}}]
    calls = [CALL, {**CALL, "id": "bbbbbbbbb", "function": {"name": "drop", "arguments": "everything"}}]
    tree, _ = grow({**TURN, "tool_calls": calls})
    text = f"Let me look.\nCalling tools:\n{[values[index] for index in json.loads(listed)]}"

    assert known is echoed(tree, {"role": "assistant", "content": text})[0]


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        ({"a": "é", "exact": False}, True),
        ({"a": "é"}, True),
        ({"a": "é", "exact": True}, False),
        ({"a": "é", "other": False}, False),
    ],
)
def test_arguments_with_their_default_may_come_and_go(arguments, known):
    """Claude Code adds the defaults of a tool's schema to the echo of a call; another value is another call."""
    tree = ConversationTree()
    before = tree.add(tree.root(tools_key(TOOLS)), [USER])
    turn = tree.add_turn(before, {**TURN, "tool_calls": with_arguments('{"a": "é"}')})
    echo = {**TURN, "tool_calls": with_arguments(json.dumps(arguments))}

    location = tree.locate(tools_key(TOOLS), [USER, echo, RESULT])

    assert known is (turn is location.place)
    assert known is not bool(location.rest[1:])


CODE = "x = 1\n"
CODE_TURN = "I add.\n<code>\nx = 1"
STOPS = ("Observation:", "Calling tools:", "</code>", "\n")


@pytest.mark.parametrize(
    ("content", "known"),
    [
        ("x = 1\n", True),
        ("x = 1", True),
        ("x = 1\n</code>", True),
        ("x = 1</code>", True),
        ("x = 1\nObservation:\n", True),
        ("x = 1</co", False),
        ("x = 2</code>", False),
        ("x = 1</code></code>", False),
        ("</code>x = 1", False),
    ],
)
def test_an_echo_may_have_any_stop_string(content, known):
    """The echo of a turn matches with and without a stop string of its request at the end, and trimmed."""
    tree, _ = grow({"role": "assistant", "content": CODE}, stops=STOPS)

    found, tolerances = echoed(tree, {"role": "assistant", "content": content})

    assert known is found
    assert ("stop_string" in tolerances) is (known and content.strip() != "x = 1")


@pytest.mark.parametrize(
    ("arguments", "known"),
    [("x = 1", True), ("x = 1\n", True), ("x  =  1", True), ("x = 2", False), ("", False), ({"x": 1}, False)],
)
@pytest.mark.parametrize("text", ["I add.\n<code>\nx = 1\n", "I add.\n<code>\nx = 1\n</code>"])
def test_code_may_be_copied_to_a_call(text, arguments, known):
    """A CodeAgent of smolagents lists the code of a turn as a call; a call with other code is another turn."""
    tree, _ = grow({"role": "assistant", "content": CODE_TURN}, stops=STOPS)
    listed = [{"id": "call_1", "type": "function", "function": {"name": "python_interpreter", "arguments": arguments}}]

    found, tolerances = echoed(tree, {"role": "assistant", "content": f"{text}\nCalling tools:\n{listed}"})

    assert known is found
    assert ("calls_as_text" in tolerances) is known


def test_other_tools_are_another_conversation():
    """The tools are part of the prompt, so the same messages with others are not known, and the tree says so."""
    tree, _ = grow(TURN)
    messages = [USER, TURN, RESULT]

    assert last_turn(tree.locate(tools_key(TOOLS), messages).place) is None
    assert tree.knows(messages, except_tools='["x"]')
    assert not tree.knows(messages, except_tools="[]")


def test_equal_turns_are_told_apart_by_their_call_ids():
    """Two turns with the same text are found by the ids that the client sends back."""
    tree, _ = grow()
    before = tree.add(tree.root("[]"), [USER])
    turns = {}
    for call_id in ("aaaaaaaaa", "bbbbbbbbb"):
        turns[call_id] = tree.add_turn(before, {**TURN, "tool_calls": [{**CALL, "id": call_id}]})
    for call_id, turn in turns.items():
        echo = {**TURN, "tool_calls": [{**CALL, "id": call_id}]}
        found = tree.locate("[]", [USER, echo, {**RESULT, "tool_call_id": call_id}])
        assert turn is found.place
        assert turn is tree.owner(call_id)


def test_equal_turns_without_calls_are_told_apart_by_what_follows():
    """A lookup keeps all turns with the same text until the messages behind them decide."""
    tree = ConversationTree()
    before, answer = tree.add(tree.root("[]"), [USER]), {"role": "assistant", "content": "Yes."}
    turns = [tree.add_turn(before, answer) for _ in range(2)]
    ends = [tree.add(turn, [{"role": "user", "content": text}]) for turn, text in zip(turns, "ab", strict=True)]

    for end, text in zip(ends, "ab", strict=True):
        assert end is tree.locate("[]", [USER, answer, {"role": "user", "content": text}]).place


def test_a_forgotten_turn_is_not_found():
    """A turn that no client has can be removed, with its call ids."""
    tree, turn = grow(TURN)
    tree.remove_turn(turn)

    assert not echoed(tree, TURN)[0]
    assert tree.owner("aaaaaaaaa") is None


def test_an_empty_message_at_the_end_is_no_turn():
    """A request that ends with an empty assistant message is not taken for one that ends with an empty turn."""
    empty = {"role": "assistant", "content": ""}
    tree, turn = grow(empty)

    assert turn.parent is tree.locate("[]", [USER, empty]).place
    tree.note(tree.locate("[]", [USER, empty, RESULT]))
    assert turn.parent is tree.locate("[]", [USER, empty]).place, "also when the turn was seen in this form"


def test_a_turn_without_text_is_found():
    """A turn of the model that is empty has its place, although empty messages are skipped elsewhere."""
    empty = {"role": "assistant", "content": ""}
    tree, turn = grow(empty)

    assert turn is tree.locate("[]", [USER, empty, RESULT]).place


@given(st.lists(st.sampled_from(["a", "b", ""]), max_size=6))
def test_empty_messages_never_hide_a_turn(texts):
    """Whatever empty messages are between, the deepest known conversation is found."""
    tree, _ = grow()
    place = tree.add(tree.root("[]"), [USER])
    kept, _ = without_empty({"role": "assistant", "content": text} for text in texts)
    for message in kept:
        place = tree.add_turn(place, message)
    location = tree.locate("[]", [USER, *({"role": "assistant", "content": text} for text in texts)])

    assert place is location.place
    assert () == location.rest
    assert [USER, *kept] == place.conversation()


class CountingDict(dict):
    """A message that counts how often its content is read."""

    reads = 0

    def get(self, *key):
        type(self).reads += 1
        return super().get(*key)


def test_known_messages_are_not_read_again():
    """A request that repeats a long conversation unchanged reads the new messages alone."""
    tree, place = grow()
    messages = [CountingDict(USER)]
    for number in range(50):
        turn = {"role": "assistant", "content": f"{number}"}
        place = tree.add_turn(place, turn)
        messages += [CountingDict(turn), CountingDict(role="user", content=f"next {number}")]
        tree.note(location := tree.locate("[]", messages))
        place = tree.add(location.place, location.rest)
    CountingDict.reads = 0
    tree.note(tree.locate("[]", [*messages, CountingDict(role="user", content="last")]))

    assert CountingDict.reads < 10
