"""Every reason for which an engine stops has a word for clients."""

import pytest
from session_scenarios import make_call, user

from turnwise.types import FinishReason, GenerateResult
from turnwise_chat_templates.template import ChatTemplate
from turnwise_gateway.session.turns import TurnReader
from turnwise_testing.inputs.tokenizers import CHATML, byte_tokenizer

CHAT = ChatTemplate(byte_tokenizer(CHATML), name="chatml")
WORDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "stop"}
"""The client of an aborted request has gone, so its reply is read by no one."""


@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_client_gets_the_reason(reason):
    """A new reason fails here until somebody has chosen its word."""
    ids = CHAT.tokenizer.encode("Hello")
    result = GenerateResult(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=reason)

    read = TurnReader(chat=CHAT).read(result, make_call(user("Hi.")), lambda _calls: ())

    assert WORDS[reason] == read.finish
