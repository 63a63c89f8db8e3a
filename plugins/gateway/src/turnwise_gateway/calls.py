"""
Calls of an agent in one form for all dialects, and the interface between the server and a session.

The dialects translate requests of Chat Completions, Messages and Responses into a `ModelCall`, and a `ModelReply` into
a response. The server knows HTTP and no tokens; a session knows tokens and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal, Protocol

from attrs import define, field, frozen

from turnwise import Message, ToolCall, ToolResult
from turnwise.types import FloatArray, TokenArray, ToolSchema
from turnwise_gateway.constraint import Constraint as Constraint  # a part of this interface
from turnwise_gateway.limits import CallLimits
from turnwise_gateway.models import Endpoint
from turnwise_gateway.refusal import CallRefusedError as CallRefusedError  # a part of this interface

RETRY_HEADER: Final = "x-stainless-retry-count"
"""The libraries of OpenAI and Anthropic count in it how often they have sent a request before."""

ToolChoice = Literal["auto", "none", "required"]
Finish = Literal["stop", "length", "tool_calls"]


@define(eq=False)
class PartialReply:
    """
    The reply to a call while it is sampled, for a stream. A session may leave it empty.

    Attributes:
        changed: set when there may be more to read.
        read: returns the reply as far as it is decided, and None while nothing is; the whole reply begins with each of
            its results.
    """

    changed: asyncio.Event = field(factory=asyncio.Event)
    read: Callable[[], ModelReply | None] = lambda: None


@frozen(kw_only=True)
class ModelCall:
    """
    One request of an agent.

    Attributes:
        dialect: name of the dialect of the request.
        messages: the conversation, each message in the form of Chat Completions with a plain text as `content`. An
            assistant message may have `reasoning_content`, and `tool_calls` with `id` and `function` of `name` and
            `arguments` (text); a tool message has `tool_call_id`. Nothing else of the request is in them.
        tools: in the form of Chat Completions; order as sent.
        tool_choice: `required` is served like `auto`, and is one of the constraints.
        constraints: forms of the turn that the agent asks for.
        max_tokens: of this turn; None leaves it to the budget.
        stop: strings that end the turn.
        stop_param: name of the field with them.
        requested_sampling: sampling parameters that the agent asked for, by their names in `SamplingParams`.
        template_options: options of the chat template that the agent asks for, by their paths in the request.
        logprobs: the reply carries log-probabilities.
        stream: the reply is sent as server-sent events.
        digest: of the body without `stream` and `stream_options`; equal requests have equal digests.
        key: names the request; a client that repeats the request sends the same key. Empty if the client sends none:
            then an equal request may be a repetition or a further sample.
        headers: of the request, names in lower case; a session reads the lineage of sub-agents from them.
        model: name that the agent sent; replies repeat it.
        ignored: fields that have no effect here; a session counts them.
        body: of the request as it came, where the server has it; None if the server has not read all of it.
        grammar: of the turn, as soon as a session has made it from the constraints; None if it needs none.
        partial_reply: receives the reply while it is sampled; None for a caller that waits for the whole reply.
        outlive: called if the sampling continues when the client leaves, with a future that is done at its end.
    """

    dialect: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    tool_choice: ToolChoice = "auto"
    constraints: tuple[Constraint, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_param: str = "stop"
    requested_sampling: Mapping[str, float | int] = field(factory=dict)
    template_options: Mapping[str, Any] = field(factory=dict)
    logprobs: bool = False
    stream: bool = False
    digest: str = ""
    key: str = ""
    headers: Mapping[str, str] = field(factory=dict)
    model: str = ""
    ignored: tuple[str, ...] = ()
    body: bytes | None = field(default=b"", eq=False, repr=False)
    grammar: str | None = field(default=None, repr=False)
    partial_reply: PartialReply | None = field(default=None, eq=False, repr=False)
    outlive: Callable[[asyncio.Future[None]], object] | None = field(default=None, eq=False, repr=False)

    @property
    def is_marked(self) -> bool:
        """Whether the library that sent the request says that it is a retry."""
        count = self.headers.get(RETRY_HEADER, "")
        return count.isdecimal() and count.strip("0") != ""


@frozen(kw_only=True)
class CallOfTool:
    """
    A tool call of a reply.

    Attributes:
        id: unique in the session.
        name: of the tool.
        arguments: a JSON object as the model wrote it, or the sampled text of a malformed call.
        place: number of characters of the content before the call; None for all of them.
        is_open: the arguments may grow; in a part of a reply only.
    """

    id: str
    name: str
    arguments: str
    place: int | None = None
    is_open: bool = False


@frozen(kw_only=True)
class Usage:
    """Token counts of a reply, exactly those of the record."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@frozen(kw_only=True, eq=False)
class ModelReply:
    """
    A turn of the model, as an agent reads it.

    Attributes:
        id: of the turn, unique in the session.
        content: text without reasoning and calls, and without white space that is alone between calls; empty when there
            is none.
        reasoning: text of the reasoning; empty when there is none.
        tool_calls: with ids that are unique in the session.
        finish: reason for the end of the turn.
        stop: the stop string that ended the turn, if one did.
        usage: token counts.
        token_ids: (n,) as sampled.
        logprobs: (n,) of the ids.
        token_texts: (n,) text of each id; empty unless the call asks for log-probabilities.
        signature: proves in the dialect Messages that `reasoning` is of this model; any text.
        provenance: session, record, turn and weight version, for `turnwise` in the reply.
    """

    id: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallOfTool, ...] = ()
    finish: Finish = "stop"
    stop: str | None = None
    usage: Usage
    token_ids: TokenArray
    logprobs: FloatArray
    token_texts: tuple[str, ...] = ()
    signature: str = ""
    provenance: Mapping[str, Any] = field(factory=dict)


@frozen(eq=False)
class DeliveredTurn:
    """
    A turn that is part of a record.

    Attributes:
        call: the first request that got it, without its body.
        reply: as the client read it.
    """

    call: ModelCall
    reply: ModelReply


class Answer(Protocol):
    """A sampled reply that no client has yet. It becomes part of the record when it is delivered."""

    @property
    def reply(self) -> ModelReply:
        """The turn."""

    def confirm(self) -> None:
        """Say that the last byte of the response was handed to the transport: the turn counts. Never raises."""

    def release(self) -> None:
        """Say that the client left before that: the turn waits for an equal request. Never raises."""

    def lose(self) -> None:
        """
        Say, after `confirm`, that the connection broke before the client had read the response. Never raises.

        The turn counts, and an equal request gets it once more.
        """


@frozen(kw_only=True)
class ForwardedCall:
    """
    A request that another server answered.

    Attributes:
        path: of the request, below the base URL.
        model: name that the agent sent.
        body: as the other server got it.
        status: of its response.
        response: body of its response, as far as it came.
    """

    path: str
    model: str
    body: bytes
    status: int
    response: bytes


class OtherModels(Protocol):
    """The models of a session besides the policy by its own name, some of which other servers have."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the run lists, without patterns and without refused ones."""

    def is_served(self, model: str) -> bool:
        """Return whether the run lists a name, perhaps by a pattern, and does not refuse it."""

    @property
    def has_endpoints(self) -> bool:
        """Whether other servers have any."""

    def find_endpoint(self, model: str) -> Endpoint | None:
        """Return the server of a model by the name that an agent sends; None for the policy."""

    def forwarding(self, describe: Callable[[], ForwardedCall]) -> AbstractAsyncContextManager[None]:
        """
        Hold the session while another server answers a call.

        Args:
            describe: returns the call with all that the other server has answered so far. It is noted at the end of the
                call, or at the end of the session, which cancels the call.

        Raises:
            CallRefusedError: the session is over or ends, or has made all its calls.
        """


class SessionBackend(Protocol):
    """One attempt of an agent at one task, as the server sees it."""

    @property
    def others(self) -> OtherModels:
        """Its calls for models of other servers."""

    @property
    def limits(self) -> CallLimits:
        """Limits of its requests; the server checks them."""

    def note_refusal(self, call: ModelCall, refusal: CallRefusedError) -> None:
        """
        Take note of a call that the server has refused.

        Args:
            call: with dialect, headers and body alone, for the request was not understood.
            refusal: the reason.
        """

    async def answer(self, call: ModelCall) -> Answer:
        """
        Sample the reply to a call.

        A cancellation means that the client has left. The engine's request ends, and no record changes, or the sampling
        continues for a retry; `ModelCall.outlive` is told so.

        Raises:
            CallRefusedError: the call has no answer.
        """

    async def count_tokens(self, call: ModelCall) -> int:
        """Return the number of prompt tokens that the call would have; nothing is recorded."""

    def tool_schemas(self) -> tuple[ToolSchema, ...]:
        """Return the schemas of the run's tools, in the form of Chat Completions; `CallRefusedError` after the end."""

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """
        Run a tool of the run in this episode; a failure of the call is a result with `error`.

        A cancellation means that the client has left; the call ends.

        Raises:
            CallRefusedError: the session is over, or a service under the tool failed.
        """


class CallerCheck(Protocol):
    """Tells whose calls a session answers, besides its key."""

    async def admits(self, client: tuple[Any, ...], server: tuple[Any, ...]) -> bool:
        """Return whether a session answers the calls of a connection between two addresses; `OSError` for no answer."""


class Directory(Protocol):
    """Finds the session of a key."""

    def find(self, key: bytes, session_id: str | None) -> SessionBackend | None:
        """
        Return the session whose model key this is; None for an unknown key or name.

        Raises:
            CallRefusedError: the session is over.
        """

    def model_name(self) -> str:
        """Return the name of the served model, for the list of models."""
