"""The lookup of a conversation that continues an earlier one finds what a lookup from the root finds."""

import json

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.tree.known_prefixes import KnownPrefixes
from turnwise_gateway.tree.places import ConversationTree

TEXTS = st.sampled_from(["", "a", " a", "a\n", "b", "<think>x</think>a"])
ROLES = st.sampled_from(["user", "user", "assistant", "tool"])


def write_tools(name):
    return json.dumps([{"type": "function", "function": {"name": name}}])


@st.composite
def messages(draw):
    message = {"role": draw(ROLES), "content": draw(TEXTS)}
    if message["role"] == "assistant" and draw(st.booleans()):
        message["reasoning_content"] = draw(TEXTS)
    if message["role"] == "assistant" and draw(st.booleans()):
        arguments = draw(st.sampled_from(['{"x": 1}', '{"x":1.0}', "{}"]))
        message["tool_calls"] = [
            {"id": draw(st.sampled_from("cd")), "type": "function", "function": {"name": "f", "arguments": arguments}}
        ]
    if message["role"] == "tool":
        message["tool_call_id"] = draw(st.sampled_from("cd"))
    return message


@st.composite
def sessions(draw):
    """Draw requests of one session, each with the turn that follows and what else happens."""
    conversations, requests = [[]], []
    for _ in range(draw(st.integers(1, 10))):
        start = draw(st.sampled_from(conversations))
        kept = start[: draw(st.integers(0, len(start)))] if draw(st.integers(0, 3)) == 0 else start
        asked = kept + draw(st.lists(messages(), min_size=not kept, max_size=2))
        turn = draw(messages()) | {"role": "assistant"}
        then = draw(st.sampled_from(["turn", "turn", "turn", "twice", "drop", "foreign", "count"]))
        echo = draw(messages()) if draw(st.integers(0, 4)) == 0 else turn
        requests.append((draw(st.sampled_from(["[]"] * 5 + [write_tools("x")])), asked, turn, then))
        conversations.append([*asked, echo] if then != "drop" else asked)
    return requests


@define
class Grown:
    """A tree that one of two lookups grows; `from_root` makes it forget the conversations that it knows."""

    from_root: bool
    tree: ConversationTree = field(factory=ConversationTree)

    def ask(self, tools, asked, turn, then):
        """Return the provenance of a lookup, and grow the tree by the request."""
        if self.from_root:
            root = self.tree.root(write_tools("other"))
            for text in "ab":  # a second child, and a turn that is gone, make all known conversations unsure
                last = self.tree.add_turn(root, {"role": "assistant", "content": text})
            self.tree.remove_turn(last)
        asked = json.loads(json.dumps(asked))
        found = self.tree.locate(tools, asked)
        provenance = (
            [found.place.conversation(), found.place.is_turn, list(found.rest), found.num_empty],
            [self.path(found.place)],
        )
        if then == "count":
            return provenance
        if then == "foreign":  # the lookup prefers places with more points
            self.tree.add(self.tree.root(tools), asked).points.extend("123")
        place = self.tree.add(found.place, found.rest)
        needed = self.tree.note(found)
        for _ in range(2 if then == "twice" else 1):
            new = self.tree.add_turn(place, turn)
            new.points.append("1")
        if then == "drop":
            self.tree.remove_turn(new)
        return *provenance, dict(needed)

    def path(self, place):
        """Return the numbers of the children on the way to a place."""
        numbers = []
        while place.parent is not None:
            numbers.append(place.parent.children.index(place))
            place = place.parent
        return numbers[::-1]


@given(sessions())
def test_lookups_find_the_place_that_a_lookup_from_the_root_finds(requests):
    """ConversationNode, rest, skipped messages and tolerances are the same, whatever the requests before."""
    known, fresh = Grown(from_root=False), Grown(from_root=True)
    for request in requests:
        assert fresh.ask(*request) == known.ask(*request)


def test_the_longest_known_conversation_is_found():
    """A conversation replaces the ones that it continues; another group has its own."""
    first, second, third = ({"role": "user", "content": text} for text in "abc")
    known = KnownPrefixes()
    known.keep("x", (first,), 1)
    known.keep("x", (first, second), 2)
    known.keep("x", (first, third), 3)

    assert (2, 2) == known.find("x", (first, second, third))
    assert (2, 3) == known.find("x", (first, third))
    assert known.find("x", (first,)) is None
    assert known.find("y", (first, second)) is None
    known.clear()
    assert known.find("x", (first, second)) is None


def stream_reply():
    """Return a tree that knows a conversation with a turn, its messages, and the turn."""
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]
    tree = ConversationTree()
    turn = tree.add_turn(tree.add(tree.root("[]"), asked[:1]), asked[1])
    tree.add(turn, asked[2:])
    tree.note(tree.locate("[]", asked))
    return tree, asked, turn


def test_a_second_place_for_a_known_conversation_is_found():
    """A conversation has two places when the model gives a turn with the same text again."""
    tree, asked, turn = stream_reply()
    second = tree.add(tree.add_turn(turn.parent, asked[1]), asked[2:])
    second.points.append("preferred")

    assert second is tree.locate("[]", [*asked, {"role": "user", "content": "c"}]).place


def test_a_lookup_before_a_fork_is_not_kept_after_it():
    """A session writes a request to the tree between its lookup and its note."""
    tree, asked, turn = stream_reply()
    found = tree.locate("[]", asked)
    second = tree.add(tree.add_turn(turn.parent, asked[1]), asked[2:])
    second.points.append("preferred")
    tree.note(found)

    assert second is tree.locate("[]", asked).place


def test_a_removed_turn_is_not_found_again():
    """A turn that no client has leaves the conversations that are known."""
    tree, asked, turn = stream_reply()
    tree.remove_turn(turn)

    assert turn.parent is tree.locate("[]", asked).place
