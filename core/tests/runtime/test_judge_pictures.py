"""Questions with pictures: the judge's engine gets them in their places, or one line says which part takes none."""

import asyncio

import pytest
from attrs import evolve

from turnwise.errors import ConfigError, DataError
from turnwise.media import Picture, picture_part
from turnwise.protocols import ModelSpec
from turnwise.runtime.judge import JudgeClient
from turnwise_chat_templates import load_chat
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine
from turnwise_testing.inputs.vision import make_picture, save_qwen
from turnwise_testing.probes.agent import probe_chat

CAT, RED = make_picture(20, 30, "blue"), make_picture(20, 30, "red")
BROKEN = Picture(data=CAT.data[:60], media_type="image/png")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """The chat of a small Qwen3-VL."""
    return load_chat(ModelSpec(path=save_qwen(tmp_path_factory.mktemp("model"))))


def question(*pictures):
    """Return a conversation whose last message has pictures."""
    return [{"role": "user", "content": [{"type": "text", "text": "Is it a cat?"}, *map(picture_part, pictures)]}]


def ask(chat, *questions, takes_pictures=True):
    """Ask a judge over a scripted engine, and return the requests of the engine."""

    async def go():
        engine = ScriptedEngine(policy=RandomPolicy(seed=2, vocab_size=120, end_token_id=258, mean_tokens=9))
        engine.capabilities = evolve(engine.capabilities, pictures=takes_pictures)
        await engine.start()
        judge = JudgeClient(engine=engine, chat=chat)
        for messages in questions:
            await judge.ask(messages)
        return engine.requests

    return asyncio.run(go())


def places(pictures):
    """Return the places and keys of pictures."""
    return [(each.start, each.num_tokens, each.picture.key) for each in pictures]


def test_the_engine_gets_the_pictures(chat):
    """As the chat of the judge shows them; ids alone tell no other question, so the seed has the pictures, too."""
    first, again, other = ask(chat, question(CAT, RED), question(CAT, RED), question(RED, CAT))
    shown = chat.picture_prompt(question(CAT, RED))
    assert first.token_ids.tolist() == shown.token_ids.tolist() == other.token_ids.tolist()
    assert places(first.pictures) == places(shown.pictures)
    assert [CAT.key, RED.key] == [each.picture.key for each in first.pictures]
    assert first.sampling.seed == again.sampling.seed != other.sampling.seed


def test_a_question_of_texts_is_as_before(chat):
    """Its request has no pictures."""
    (request,) = ask(chat, [{"role": "user", "content": "Is it a cat?"}], takes_pictures=False)
    assert request.pictures == ()
    assert request.token_ids.tolist() == chat.prompt([{"role": "user", "content": "Is it a cat?"}]).tolist()


def test_what_takes_no_pictures_is_named(chat):
    """The engine, the model or the chat, before a request."""

    class Texts:
        """A chat without the methods for pictures."""

        stop_token_ids = (0,)

        def prompt(self, messages, tools=()):
            raise AssertionError

    with pytest.raises(
        ConfigError, match=r"judge: its question has pictures, which need an engine with the capability"
    ):
        ask(chat, question(CAT), takes_pictures=False)
    with pytest.raises(ConfigError, match=r"judge: .*the model takes no pictures"):
        ask(probe_chat(), question(CAT))
    with pytest.raises(ConfigError, match=r"judge\.chat: a question has pictures, and the chat Texts takes none"):
        ask(Texts(), question(CAT))
    with pytest.raises(DataError, match="is broken"):
        ask(chat, question(BROKEN))
