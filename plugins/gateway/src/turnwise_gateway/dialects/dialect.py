"""A dialect as one object: all that the server, the reader of bodies and the files of requests know of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from attrs import field, frozen

from turnwise.types import JsonDict
from turnwise_gateway.calls import CallRefusedError, Finish, ModelCall, SessionBackend
from turnwise_gateway.dialects.exchange import Exchange, Received
from turnwise_gateway.dialects.field_rules import FieldTable

Question = Callable[[SessionBackend, ModelCall], Awaitable[JsonDict]]
"""Returns the body of a response from a call that is not made."""


@frozen(kw_only=True, eq=False)
class Dialect:
    """
    A form in which agents call the model.

    Attributes:
        name: in calls, log lines and files of requests.
        path: of calls, below the base URL.
        questions: answers to requests about a call, such as its number of tokens, by their paths.
        header: sent by its clients alone, in lower case; None if they send none.
        fields: the effect of each field of a request.
        list_key: field of a request with the items of its conversation.
        id_prefix: in its replies, before the id of a turn.
        finishes: word for each reason for the end of a turn.
        read: returns the call of a request; `CallRefusedError` names the first field that is wrong or not supported.
        describe_error: returns the body of an error response.
    """

    name: str
    path: str
    questions: Mapping[str, Question] = field(factory=dict)
    header: str | None = None
    fields: FieldTable
    list_key: str
    id_prefix: str
    finishes: Mapping[Finish, str]
    read: Callable[[Received], Exchange]
    describe_error: Callable[[CallRefusedError], JsonDict]

    def is_asked_by(self, path: str) -> bool:
        """Return whether a path that may have no route has the last word of this dialect's path."""
        return f"/{self.path.rpartition('/')[2]}" in path
