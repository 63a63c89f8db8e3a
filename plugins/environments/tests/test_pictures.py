"""Observations with pictures: messages that show them, exact records, and pictures that no chat shows."""

import asyncio

import pytest
from attrs import evolve
from grid_walk import GridWalk
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import ToolResult
from turnwise.media import Picture, picture_part, read_picture_part
from turnwise.protocols import ModelSpec, Resources
from turnwise.types import Status
from turnwise_chat_templates import load_chat
from turnwise_environments import EnvironmentConfig, Observation, make_agent
from turnwise_environments.shown import join_contents
from turnwise_testing import EnvironmentSuite
from turnwise_testing.checks.environment import EnvironmentProbe, check_pictures_can_be_shown
from turnwise_testing.inputs.vision import make_picture, save_qwen
from turnwise_testing.probes.agent import AgentProbe, ProbeParser, make_task, probe_chat, probe_resources

CAT, DOG = make_picture(20, 30, "red"), make_picture(50, 20, "blue", "JPEG")
BROKEN = Picture(data=CAT.data[:60], media_type="image/png")
NO_PICTURE = Picture(data=b"words", media_type="image/png")
LARGE = Picture(data=CAT.data + bytes(20 << 20), media_type="image/png")
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """The chat of a small Qwen3-VL."""
    return load_chat(ModelSpec(path=save_qwen(tmp_path_factory.mktemp("model"))))


class Shows:
    """Returns given pictures in given ways."""

    def __init__(self, first=(), then=(), form="pictures", text="Look.", **_options):
        self._first, self._then, self._form, self._text = first, then, form, text

    @property
    def tools(self):
        """One tool, where the pictures are its results."""
        schema = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
        return ({"type": "function", "function": schema},) if self._form == "tool" else ()

    def reset(self, task, seed):
        return self._show(self._first)

    def step(self, action):
        return self._show(self._then)

    def close(self):
        pass

    def _show(self, pictures):
        if self._form != "messages":
            return Observation(text=self._text, pictures=tuple(pictures))
        content = [{"type": "text", "text": self._text}, *map(picture_part, pictures)]
        return Observation(messages=({"role": "user", "content": content},))


def play(
    chat, turns=("go",), max_turns=2, task=None, limits=None, environment=f"{__name__}:Shows", tools=(), **options
):
    """Run one episode."""
    config = EnvironmentConfig(environment=environment, options=options, max_turns=max_turns)
    resources = Resources(chat=chat, parser=ProbeParser(chat), tools=dict(tools))
    probe = AgentProbe(make_agent=lambda: make_agent(config, resources), resources=resources, turns=turns)

    async def run():
        engine = probe.engine()
        engine.capabilities = evolve(engine.capabilities, pictures=True)
        await engine.start()
        return await probe.run(task or make_task(), engine=engine, limits=probe.limits(**(limits or {})))

    return asyncio.run(run())


def shown_by(result):
    """Return the keys of the pictures of each message."""
    found = []
    for message in result.messages:
        parts = message["content"] if isinstance(message["content"], list) else []
        found.append([read_picture_part(part).key for part in parts if part["type"] == "image_url"])
    return found


@settings(max_examples=20, deadline=None)
@given(
    first=st.lists(st.sampled_from([CAT, DOG]), max_size=2),
    then=st.lists(st.sampled_from([CAT, DOG]), max_size=2),
    form=st.sampled_from(["pictures", "messages", "tool"]),
    text=st.sampled_from(["Look.", ""]),
    asked=st.sampled_from(["What?", [{"type": "text", "text": "What?"}, picture_part(DOG)]]),
)
def test_the_record_is_that_of_the_messages(chat, first, then, form, text, asked):
    """Prompt and observations are in the record as the chat shows the messages, with each picture in its place."""
    task = make_task(messages=({"role": "user", "content": asked},))
    run = play(chat, (CALL if form == "tool" else "go",), task=task, first=first, then=then, form=form, text=text)
    result = run.result
    assert result.status is Status.COMPLETED, result.fault
    own = [DOG] if not isinstance(asked, str) and form != "messages" else []
    expected = [[each.key for each in (*own, *first)], [], [each.key for each in then], []]
    assert shown_by(result) == expected
    (record,) = result.trajectories
    assert [each.picture.key for each in record.pictures] == [key for keys in expected for key in keys]
    prompt = chat.picture_prompt(result.messages[:1], Shows(form=form).tools)
    ids, end = record.input_ids.tolist(), chat.stop_token_ids[0]
    turn = [*chat.tokenizer.encode(CALL if form == "tool" else "go"), end]
    delta = chat.picture_delta(result.messages[2:3], end, with_tools=form == "tool")
    assert ids == [*ids_of(prompt), *turn, *ids_of(delta), *turn]
    assert all(
        (record.input_ids[each.start : each.stop] == record.input_ids[each.start]).all() for each in record.pictures
    )
    assert result.messages[2]["role"] == ("tool" if form == "tool" else "user")


def ids_of(given):
    return getattr(given, "token_ids", given).tolist()


@pytest.mark.parametrize("form", ["pictures", "messages", "tool"])
@pytest.mark.parametrize(
    ("picture", "reason"),
    [(BROKEN, "is broken"), (NO_PICTURE, "of no known type"), (LARGE, "more than 20971520")],
    ids=["broken", "no picture", "large"],
)
@pytest.mark.parametrize("at", ["first", "then"])
def test_an_environment_is_at_fault_for_its_picture(chat, form, picture, reason, at):
    """At the reset and at a step, however it returns it."""
    result = play(chat, (CALL if form == "tool" else "go",), form=form, **{at: (picture,)}).result
    assert result.status is Status.FAILED
    assert (result.fault.owner, reason in result.fault.message) == ("tool", True), result.fault
    assert "environment" in result.fault.message


def test_a_bomb_is_not_decoded(tmp_path):
    """The chat sets the limit of pixels."""
    chat = load_chat(ModelSpec(path=save_qwen(tmp_path)), max_picture_pixels=100)
    fault = play(chat, then=(CAT,)).result.fault
    assert fault.owner == "tool"
    assert "has 20 x 30 pixels, more than the 100 of max_picture_pixels" in fault.message


def test_the_number_of_pictures(chat):
    """An observation with more than the limit ends the episode as truncated."""
    result = play(chat, first=(CAT,), then=(DOG, DOG), limits={"max_pictures": 2}).result
    assert (result.status, result.limit.name) == (Status.TRUNCATED, "rollout.max_pictures")
    assert [each.picture.key for each in result.trajectories[0].pictures] == [CAT.key]


def test_a_chat_of_texts_ends_the_run():
    """A driver ends a run by errors of its config; the line names the chat."""

    class Texts:
        """A chat without the methods for pictures."""

        def __init__(self, chat):
            self.tokenizer, self.stop_token_ids, self.guard = chat.tokenizer, chat.stop_token_ids, chat.guard
            self.prompt, self.delta, self.text = chat.prompt, chat.delta, chat.text

    for texts, reason in ((Texts(probe_chat()), "the chat Texts takes none"), (probe_chat(), "the model takes no")):
        fault = play(texts, first=(CAT,)).result.fault
        assert (fault.kind, reason in fault.message) == ("ConfigError", True), fault


def test_what_is_no_picture_is_named():
    """An image of pillow is not a file."""
    with pytest.raises(TypeError, match=r"must be one of turnwise.media.read_picture, got object"):
        Observation(pictures=(object(),))


def test_tools_of_the_run_show_pictures(chat):
    """Beside those of the environment."""
    tool = probe_resources().tools["add"]

    class Draws(type(tool)):
        async def execute(self, session, arguments):
            return ToolResult(text="Drawn:", pictures=(DOG,))

    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    result = play(chat, (call,), first=(CAT,), tools={"add": Draws()}).result
    assert shown_by(result) == [[CAT.key], [], [DOG.key], []]


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        ("a", "b", "a\n\nb"),
        ("a", "", "a"),
        ("", ["p"], ["p"]),
        ("a", ["p"], [{"type": "text", "text": "a"}, "p"]),
        ("a", [{"type": "text", "text": "b"}, "p"], [{"type": "text", "text": "a\n\nb"}, "p"]),
        ([{"type": "text", "text": "a"}], "b", [{"type": "text", "text": "a\n\nb"}]),
        (["p"], "b", ["p", {"type": "text", "text": "b"}]),
    ],
)
def test_contents_are_joined(first, second, joined):
    """Texts by an empty line, pictures in their order."""
    assert join_contents(first, second) == joined


class TestGridWalk(EnvironmentSuite):
    """An environment that draws its state; with seed 0 the walker is two cells above the goal."""

    episode = ("up", "I go down", "down")

    def make_environment(self):
        """Nine cells."""
        return GridWalk()


def test_a_walk_is_recorded(chat):
    """Each turn but the last is followed by the grid as the walk has left it."""
    run = play(chat, ("right",), max_turns=3, environment="grid_walk:GridWalk", size=5)
    drawn = GridWalk(size=5)
    drawn.reset(None, 0)
    keys = [keys for keys in shown_by(run.result) if keys]
    assert len(keys) >= 1
    assert all(len(each) == 1 for each in keys)
    assert [each.picture.key for each in run.result.trajectories[0].pictures] == [key for each in keys for key in each]


@pytest.mark.parametrize("picture", [BROKEN, NO_PICTURE])
def test_the_suite_finds_a_picture_that_no_chat_shows(picture):
    """The line says which observation has it."""
    probe = EnvironmentProbe(make_environment=lambda: Shows(then=(CAT, picture)), episode=("go",))
    with pytest.raises(AssertionError, match="observation 1: "):
        asyncio.run(check_pictures_can_be_shown(probe))
    good = EnvironmentProbe(make_environment=lambda: Shows(then=(CAT, DOG)), episode=("go",))
    assert asyncio.run(check_pictures_can_be_shown(good)) is None
