"""Simulated users: scripts, goals, the end of a conversation, and whole episodes."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import Reply, Resources, Task
from turnwise.errors import ConfigError, DataError
from turnwise.media import find_picture, is_picture_part, picture_part
from turnwise_simulated_users import make_model_user, make_scripted_user
from turnwise_simulated_users.config import ModelUserConfig, ScriptedUserConfig
from turnwise_simulated_users.model_user import exchange_roles


def task(**extra):
    """Return a task with columns."""
    return Task(messages=({"role": "user", "content": "Hello."},), uid="task", extra=extra)


class Judge:
    """Says the given texts, and keeps the conversations that it was asked."""

    def __init__(self, *texts):
        self.texts, self.asked = list(texts), []

    async def ask(self, messages, sampling=None):
        self.asked.append(messages)
        return self.texts.pop(0)


def converse(user, of, *answers):
    """Return the replies to some answers, up to the end of the conversation."""

    async def run():
        session = await user.create(of)
        messages, replies = list(of.messages), []
        for answer in answers:
            messages.append({"role": "assistant", "content": answer})
            replies.append(await user.respond(session, messages))
            if replies[-1].should_terminate:
                break
            messages.append({"role": "user", "content": replies[-1].content})
        await user.release(session)
        return replies

    return asyncio.run(run())


def model_user(judge, **options):
    """Return a user whom a judge plays."""
    return make_model_user(ModelUserConfig(**options), Resources(judge=judge))


END = Reply(should_terminate=True)


def test_a_script_is_said_in_order_and_then_ends():
    """One message after each answer, and the end after the answer to the last one."""
    user = make_scripted_user(ScriptedUserConfig(replies=("One", "Two")), Resources())

    assert converse(user, task(), "a", "b", "c", "d") == [Reply(content="One"), Reply(content="Two"), END]


def test_a_task_has_its_own_script():
    """The column of a task, or of its extra_info, replaces the config's messages."""
    user = make_scripted_user(ScriptedUserConfig(replies=("One",)), Resources())

    assert converse(user, task(user_replies=["Mine"]), "a", "b") == [Reply(content="Mine"), END]
    assert converse(user, task(extra_info={"user_replies": []}), "a") == [END]


def test_an_answer_can_end_the_script():
    """A text of `stop_when` ends the conversation, whatever its case."""
    user = make_scripted_user(ScriptedUserConfig(replies=("One",), stop_when=("Goodbye",)), Resources())

    assert converse(user, task(), "And GOODBYE!") == [END]


@pytest.mark.parametrize("wrong", ["text", [1], {}])
def test_a_wrong_script_is_the_datas_fault(wrong):
    """The error names the task and the column."""
    user = make_scripted_user(ScriptedUserConfig(), Resources())

    with pytest.raises(DataError, match="task task: user_replies must be a list of texts"):
        converse(user, task(user_replies=wrong), "a")


def test_the_model_plays_the_goal():
    """The user's model reads the goal and the stop text, and the conversation with the roles exchanged."""
    judge = Judge("I want {tea}. ", "###STOP###")
    replies = converse(model_user(judge, goal="You want {stop} {tea}."), task(), "What do you want?", "Here it is.")

    assert replies == [Reply(content="I want {tea}."), END]
    system, *rest = judge.asked[1]
    assert "You want {stop} {tea}." in system["content"]
    assert "write ###STOP### and nothing else" in system["content"]
    assert [(each["role"], each["content"]) for each in rest] == [
        ("user", "Hi! How can I help you today?"),
        ("assistant", "Hello."),
        ("user", "What do you want?"),
        ("assistant", "I want {tea}."),
        ("user", "Here it is."),
    ]


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("Thanks ###STOP###", END),
        ("  \n", END),
        ("<think>I should ###STOP###</think> More.", Reply(content="More.")),
        ("x" * 50, Reply(content="x" * 10)),
    ],
)
def test_messages_of_the_model_are_cleaned(text, reply):
    """The stop text or nothing ends the conversation; reasoning is removed, and long messages are cut."""
    assert converse(model_user(Judge(text), goal="Tea.", max_reply_length=10), task(), "a") == [reply]


def test_the_number_of_replies_is_limited():
    """After `max_replies` messages the model is not asked again."""
    judge = Judge("One")

    assert converse(model_user(judge, goal="Tea.", max_replies=1), task(), "a", "b") == [Reply(content="One"), END]


def test_a_task_needs_a_goal():
    """The column of the task replaces the config's goal; without any the task is to blame."""
    judge = Judge("Hm", "###STOP###")
    converse(model_user(judge, goal="Tea."), task(user_goal="Coffee."), "a", "b")

    assert "Coffee." in judge.asked[0][0]["content"]
    with pytest.raises(DataError, match="task task: the user has no goal: set user_goal in the data to a text"):
        converse(model_user(Judge()), task(), "a")


def test_a_run_without_a_judge_is_refused():
    """The error says which section is missing."""
    with pytest.raises(ConfigError, match="add a section 'judge' to the config"):
        make_model_user(ModelUserConfig(), Resources())


def test_instructions_must_have_their_places():
    """A text of the user's own must say the goal and the stop text."""
    with pytest.raises(ValueError, match=r"'instructions' must contain \{goal\} and \{stop\}"):
        ModelUserConfig(instructions="Be nice.")


def test_an_interrupted_conversation_continues():
    """The notes of `suspend` are JSON, and the restored session replies as the old one would have."""
    scripted = make_scripted_user(ScriptedUserConfig(replies=("One", "Two")), Resources())
    model = model_user(Judge("One", "Two"), goal="Tea.", max_replies=1)

    async def run(user):
        session = await user.create(task())
        messages = [{"role": "assistant", "content": "a"}]
        first = await user.respond(session, messages)
        again = await user.restore(task(), await user.suspend(session))
        return first, await user.respond(again, messages)

    assert asyncio.run(run(scripted)) == (Reply(content="One"), Reply(content="Two"))
    assert asyncio.run(run(model)) == (Reply(content="One"), END)


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
CAT, DOG = (find_picture(b"\x89PNG\r\n\x1a\n" + name, "image/png") for name in (b"cat", b"dog"))
PARTS = st.sampled_from([picture_part(CAT), picture_part(DOG), {"type": "text", "text": "c"}])
CONTENTS = st.sampled_from(["", "a", "b ", None]) | st.lists(PARTS, max_size=4)
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}))


@given(MESSAGES)
def test_exchanged_roles_alternate(messages):
    """Whatever the conversation, the user's model reads turns that alternate and end with the assistant's."""
    roles = [message["role"] for message in exchange_roles("Play.", messages)]

    assert roles == ["system", *(("user", "assistant")[index % 2] for index in range(len(roles) - 1))]
    assert roles[-1] == "user"
    assert [message["role"] for message in messages].count("assistant") >= roles.count("user") - 2


@given(MESSAGES)
def test_the_model_sees_pictures(messages):
    """All that the user and the assistant show, in order, and in messages that every chat template shows them in."""
    seen = exchange_roles("Play.", messages)
    assert [part for message in messages if message["role"] in ("user", "assistant") for part in shown(message)] == [
        part for message in seen for part in shown(message)
    ]
    assert all(message["role"] == "user" for message in seen if shown(message))
    marks = sum(message["content"].count("[picture]") for message in seen if message["role"] == "assistant")
    assert marks == sum(len(shown(message)) for message in messages if message["role"] == "user")


def shown(message):
    content = message["content"]
    return [part for part in content if is_picture_part(part)] if isinstance(content, list) else []


def test_a_picture_of_the_user():
    """Its model reads where the picture is, and sees it in the message before."""
    asked = {
        "role": "user",
        "content": [{"type": "text", "text": "Is "}, picture_part(CAT), {"type": "text", "text": " a cat?"}],
    }
    _system, greeting, question, answer = exchange_roles("Play.", [asked, {"role": "assistant", "content": "Yes."}])
    assert greeting["content"][-2:] == [{"type": "text", "text": "(Your next message shows:)"}, picture_part(CAT)]
    assert question == {"role": "assistant", "content": "Is [picture] a cat?"}
    assert answer == {"role": "user", "content": "Yes."}
