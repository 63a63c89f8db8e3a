"""Conversations with pictures in a session: echoes continue a record, and each run of placeholders has its picture."""

import json
import random
from base64 import b64encode

import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from picture_requests import DIALECTS, url_of, write_body, write_parts, write_result, write_turn, write_url, write_user
from session_scenarios import Sessions

from turnwise import Status
from turnwise.media import Picture, picture_part
from turnwise.protocols import ModelSpec
from turnwise_chat_templates import load_chat
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.dialects import RequestMemory, find_dialect, read_exchange
from turnwise_gateway.replay.request_file import log_session, read_body, read_requests
from turnwise_testing.inputs.vision import draw_picture, make_picture, save_qwen
from turnwise_testing.probes.agent import make_task

PICTURES = [make_picture(color="red"), make_picture(16, 24, "blue", "JPEG"), draw_picture(3, 40, 32)]
PIECES = st.lists(st.one_of(st.sampled_from(["Look.", "", "  and\nhere "]), st.sampled_from(PICTURES)), max_size=4)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """The chat of a small vision-language model."""
    return load_chat(ModelSpec(path=save_qwen(tmp_path_factory.mktemp("model"))))


def make_engine(probe):
    engine = probe.engine()
    engine.capabilities = evolve(engine.capabilities, pictures=True)
    return engine


class Client:
    """A client of one dialect, which sends its whole conversation with each call."""

    def __init__(self, session, dialect):
        self.session, self.dialect, self.items = session, dialect, []
        self._memory, self.bodies = RequestMemory(session.limits), []

    async def call(self, *items, **more):
        """Send new items; return the reply."""
        self.items += items
        body = json.dumps(write_body(self.dialect, self.items, **more)).encode()
        self.bodies.append(body)
        answer = await self.session.answer(read_exchange(find_dialect(self.dialect), body, {}, self._memory).call)
        answer.confirm()
        self.items += write_turn(self.dialect, answer.reply)
        return answer.reply

    def user(self, *pieces):
        return write_user(self.dialect, write_parts(self.dialect, pieces))


def pictures_in(messages):
    """Return the URLs of the pictures of messages, in order."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part["image_url"]["url"] for content in contents for part in content if part["type"] == "image_url"]


def check_places(record, chat):
    """Check that each picture has placeholders, as many as it has alone, and that there are no others."""
    (pad,) = chat.tokenizer.encode("<|image_pad|>")
    ids = record.input_ids
    for place in record.pictures:
        alone = chat.picture_prompt([{"role": "user", "content": [picture_part(place.picture)]}])
        assert alone.pictures[0].num_tokens == place.num_tokens
        assert (ids[place.start : place.stop] == pad).all()
    assert (ids == pad).sum() == sum(place.num_tokens for place in record.pictures)


@settings(max_examples=25)
@given(dialect=st.sampled_from(DIALECTS), steps=st.lists(PIECES, min_size=1, max_size=5), seed=st.integers(0, 2**16))
@example(dialect="messages", steps=[[PICTURES[0]], [PICTURES[0], PICTURES[0]], ["a", PICTURES[1], "", "b"]], seed=1)
@example(dialect="responses", steps=[[PICTURES[2]], []], seed=2)
def test_an_echo_continues_the_record(chat, dialect, steps, seed):
    """A conversation that grows stays in one record, with its pictures at their placeholders, in their order."""
    shuffled = random.Random(seed)

    async def converse(session):
        client, reply = Client(session, dialect), None
        for pieces in steps:
            if reply is not None and reply.tool_calls:
                results = [
                    write_result(dialect, call.id, write_parts(dialect, shuffled.sample(pieces, len(pieces))))
                    for call in reply.tool_calls
                ]
                reply = await client.call(*results)
            else:
                reply = await client.call(client.user("Now.", *pieces))

    done = Sessions(chat=chat).run(converse, engine=make_engine)

    assert Status.COMPLETED is done.result.status
    (record,) = done.records
    check_places(record, chat)
    shown = [url_of(each.picture.data, each.picture.media_type) for each in record.pictures]
    assert pictures_in(done.result.messages) == shown
    assert len(steps) == len(record.turns())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_picture_that_was_encoded_again(chat, dialect):
    """It is another picture, so the conversation is another one, as after a changed text."""
    again = Picture(data=PICTURES[0].data + b"\0", media_type="image/png")

    async def converse(session):
        client = Client(session, dialect)
        await client.call(client.user("Look:", PICTURES[0]))
        client.items[0] = client.user("Look:", again)
        await client.call(client.user("And now?"))

    done = Sessions(chat=chat, turns=("Yes.",)).run(converse, engine=make_engine)

    assert [[PICTURES[0].key], [again.key]] == [[p.picture.key for p in each.pictures] for each in done.records]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_harmless_changes_of_an_echo(chat, dialect):
    """Another name of the type, white space at the ends of a text and divided texts are the same conversation."""

    async def converse(session):
        client = Client(session, dialect)
        await client.call(client.user("Look:", PICTURES[0], "one\ntwo"))
        other = write_url(dialect, url_of(PICTURES[0].data, "image/jpeg"))
        texts = [write_parts(dialect, [text])[0] for text in ("Look: ", "one", "two")]
        client.items[0] = write_user(dialect, [texts[0], other, *texts[1:]])
        await client.call(client.user("And now?"))

    done = Sessions(chat=chat, turns=("Yes.",)).run(converse, engine=make_engine)

    assert [2] == [len(record.turns()) for record in done.records]
    assert 1 == done.counts["echo_whitespace"]


def test_branches_and_template_histories(chat):
    """Two continuations of a picture share it, and `history: template` renders it again."""

    async def converse(session):
        client = Client(session, "chat")
        await client.call(client.user("Look:", PICTURES[0]))
        before = list(client.items)
        await client.call(client.user("One?", PICTURES[1]))
        client.items = before
        await client.call(client.user("Two?", PICTURES[2]))

    for options in ({}, {"history": "template"}):
        done = Sessions(chat=chat, turns=("Yes.",)).run(converse, engine=make_engine, **options)

        assert [[0, 1], [0, 2]] == [
            [PICTURES.index(place.picture) for place in record.pictures] for record in done.records
        ]
        for record in done.records:
            check_places(record, chat)


def test_too_many_pictures(chat):
    """A call with too many pictures is refused in one line, and the conversation continues without the last picture."""

    async def converse(session):
        client = Client(session, "chat")
        with pytest.raises(CallRefusedError) as refused:
            await client.call(client.user(*PICTURES))
        assert ("invalid", "messages") == (refused.value.kind, refused.value.param)
        assert "the conversation has 3 pictures, more than rollout.max_pictures=2" == refused.value.message
        client.items.clear()
        await client.call(client.user(*PICTURES[:2]))
        with pytest.raises(CallRefusedError, match="has 3 pictures"):
            await client.call(client.user(PICTURES[2]))
        client.items.pop()
        await client.call(client.user("So what?"))

    done = Sessions(chat=chat, turns=("Yes.",)).run(converse, engine=make_engine, limits={"max_pictures": 2})

    assert (Status.COMPLETED, 2) == (done.result.status, done.counts["refused_invalid"])
    assert [2] == [len(record.turns()) for record in done.records]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engine_without_pictures(chat, dialect):
    """They are refused by their place, as every part that is no text."""

    async def converse(session):
        client = Client(session, dialect)
        with pytest.raises(CallRefusedError, match="and the model reads text only") as refused:
            await client.call(client.user("Look:", PICTURES[0]))
        assert refused.value.param.endswith("[0].content[1]")
        client.items.clear()
        await client.call(client.user("Hello."))

    assert Status.COMPLETED is Sessions(chat=chat).run(converse).result.status


def test_a_chat_without_pictures():
    """The probe's model has no image processor; the line says so."""

    async def converse(session):
        client = Client(session, "chat")
        with pytest.raises(CallRefusedError, match="takes no pictures: its directory has no image processor"):
            await client.call(client.user("Look:", PICTURES[0]))
        client.items.clear()
        await client.call(client.user("Hello."))

    assert Status.COMPLETED is Sessions().run(converse, engine=make_engine).result.status


def test_the_conversation_of_the_task(chat):
    """A task with a picture is recognised, so that its record has the seed of the task and no name."""
    task = make_task(
        messages=({"role": "user", "content": [{"type": "text", "text": "Q"}, picture_part(PICTURES[0])]},)
    )

    async def converse(session):
        client = Client(session, "messages")
        await client.call(client.user("Other.", PICTURES[1]))
        client.items.clear()
        await client.call(client.user("Q", PICTURES[0]))
        assert [False, True] == [record.name == "" for record in session.book.records]

    Sessions(chat=chat, turns=("Yes.",)).run(converse, engine=make_engine, task=task)


def test_files_of_requests(chat, tmp_path):
    """They hold a picture once, and records name theirs; tokens alone do not tell two of one size apart."""
    red, blue = (
        Picture(data=make_picture(color=color).data + bytes(3000), media_type="image/png") for color in ("red", "blue")
    )
    bodies = []

    async def converse(session):
        log_session(session, tmp_path)
        for picture in (red, blue):
            client = Client(session, "chat")
            await client.call(client.user("Look:", picture))
            await client.call(client.user("Again: é", picture))
            bodies.extend(client.bodies)

    Sessions(chat=chat, turns=("Yes.",)).run(converse, engine=make_engine)

    file = read_requests(tmp_path / "session.jsonl")
    assert file.capabilities.pictures
    contexts = [event["context"] for event in file.events if "context" in event]
    assert contexts[0][0] == contexts[2][0]
    assert contexts[0][1] != contexts[2][1]
    assert bodies == [read_body(event, file.data) for event in file.events if event["event"] == "call"]
    assert [b64encode(each.data).decode() for each in (red, blue)] == list(file.data.values())
    assert file.path.read_text().count(b64encode(red.data).decode()) == 1
    assert [[red.key] * 2, [blue.key] * 2] == [[key for _, _, key in record["pictures"]] for record in file.records]
