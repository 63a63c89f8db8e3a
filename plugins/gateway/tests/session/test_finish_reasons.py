"""Every reason for which an engine stops has a word for clients in every dialect."""

import pytest
from session_scenarios import make_call, user

from turnwise.types import FinishReason, GenerateResult
from turnwise_chat_templates.template import ChatTemplate
from turnwise_gateway.dialects import DIALECTS
from turnwise_gateway.session.turns import TurnReader
from turnwise_testing.inputs.tokenizers import CHATML, byte_tokenizer

CHAT = ChatTemplate(byte_tokenizer(CHATML), name="chatml")


@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_client_gets_the_reason(reason):
    """A turn that a limit has cut is told as cut: every dialect has a word for that which no other end has."""
    ids = CHAT.tokenizer.encode("Hello")
    result = GenerateResult(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=reason)

    read = TurnReader(chat=CHAT).read(result, make_call(user("Hi.")), lambda _index, _call: "")

    told = [each.finishes[read.finish] for each in DIALECTS]
    cut = [each.finishes["length"] for each in DIALECTS]
    assert [reason.is_cut] * len(DIALECTS) == [word == other for word, other in zip(told, cut, strict=True)]
