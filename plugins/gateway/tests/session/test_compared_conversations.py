"""Conversations of a session are compared with the chat template's renderings of the whole."""

import threading

import pytest
from session_scenarios import Sessions, as_message, make_call, results_of, user
from structlog.testing import capture_logs

from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import CHATML, byte_tokenizer

LATE = CHATML.replace("+ message.content", "+ message.content + (' (late)' if loop.index > 20 else '')", 2)
"""Marks the users' messages and the results behind the 20th message."""
CUTS = CHATML.replace("'\\n<tool_response>\\n' + message.content", "'\\n<tool_response>\\n' + message.content[:2000]")
NUM_TURNS = 11


def converse_in(*openings, text="5"):
    """Return a scenario with a conversation for each opening."""

    async def converse(session):
        for opening in openings:
            messages = [user(opening)]
            for _ in range(NUM_TURNS):
                answer = await session.answer(make_call(*messages))
                answer.confirm()
                messages += [as_message(answer.reply), *(results_of(answer.reply, text) or [user("Go on.")])]

    return converse


def run_sessions(template, *openings, every=1, text="5"):
    """Return the metrics of the template in a session, and the warnings."""
    chat = ChatTemplate(byte_tokenizer(template), name="test.jinja", check_every=every)
    with capture_logs() as logs:
        done = Sessions(chat=chat).run(converse_in(*openings, text=text))
    extra = done.result.metrics.extra
    found = {name.removeprefix("template/"): value for name, value in extra.items() if name.startswith("template/")}
    assert len(done.records) == len(openings)
    return found, [line for line in logs if line["event"] == "the chat template renders a conversation differently"]


def test_rule_by_position():
    """A template that changes messages after the 20th passes the proofs; its conversations count, and one is told."""
    found, warnings = run_sessions(LATE, "One?", "Two?")

    assert found == {"compared_conversations": 2.0, "differing_conversations": 2.0}
    (warning,) = warnings
    assert warning["template"] == "test.jinja"
    assert "(late)" in warning["at"]


@pytest.mark.parametrize(("text", "differing"), [("x" * 100, 0.0), ("x" * 4000, 1.0)], ids=["short", "long"])
def test_rule_by_length(text, differing):
    """A template that cuts long results differs if there is one."""
    found, warnings = run_sessions(CUTS, "One?", text=text)

    assert found == {"compared_conversations": 1.0, "differing_conversations": differing}
    assert len(warnings) == differing


def test_no_rule():
    """A template without such rules is compared, and does not differ."""
    assert run_sessions(CHATML, "One?", "Two?") == ({"compared_conversations": 2.0, "differing_conversations": 0.0}, [])


class ThreadsOf(ChatTemplate):
    """Notes the threads in which it compares conversations."""

    def check_conversation(self, number, messages, tools):
        self.threads = {*getattr(self, "threads", ()), threading.current_thread()}
        return super().check_conversation(number, messages, tools)


def test_other_sessions_do_not_wait():
    """A comparison renders a conversation many times, so it runs beside the loop that answers calls."""
    chat = ThreadsOf(byte_tokenizer(), check_every=1)

    done = Sessions(chat=chat).run(converse_in("One?"))

    assert done.result.metrics.extra["template/compared_conversations"] == 1.0
    assert threading.main_thread() not in chat.threads


def test_none_is_compared():
    """The option turns the comparison off."""
    assert run_sessions(LATE, "One?", every=0) == ({}, [])
