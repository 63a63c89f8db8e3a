"""An agent that acts at random in its conversations, and checks of the records of its session."""

import asyncio
import json
import random

from attrs import define, field
from session_scenarios import as_message, make_call, results_of, user

from turnwise.record.columns import Origin
from turnwise_gateway.calls import CallRefusedError
from turnwise_strict_json import read_arguments

ACTIONS = (
    "continue",
    "continue",
    "continue",
    "repeat",
    "undelivered",
    "keyed",
    "lost",
    "cut",
    "retry",
    "edit",
    "compact",
    "branch",
    "parallel",
    "title",
    "empty",
)


@define(eq=False)
class Conversation:
    """A conversation as the client has it; `context` is the ids that the next turn must start with."""

    messages: list
    context: list[int] = field(factory=list)

    def fork(self):
        return Conversation(list(self.messages), list(self.context))


@define(eq=False)
class RandomAgent:
    """
    A client that does random things with its conversations.

    Attributes:
        choices: source of its decisions.
        actions: that it takes.
        replies: that it has read, by id.
        unread: replies whose delivery has failed; it may have read some of them later.
        keeps_context: whether a context must start with the ids of the turn before.
        refusals: kinds of refusals that it takes.
        num_extended: contexts that did.
    """

    choices: random.Random
    actions: list[str]
    replies: dict = field(factory=dict)
    unread: list = field(factory=list)
    keeps_context: bool = True
    refusals: tuple[str, ...] = ("budget_exhausted", "context_length_exceeded")
    num_extended: int = 0
    conversations: list[Conversation] = field(factory=list)

    async def run(self, session):
        conversations = self.conversations = [Conversation([user("Question 0?")])]
        for number, action in enumerate(self.actions):
            current = self.choices.choice(conversations)
            new = await getattr(self, f"_{action}")(session, current, number)
            conversations += new or []

    async def _ask(self, session, conversation, **changes):
        """Ask, check that the context starts with the ids of the turn before, and take the answer."""
        try:
            answer = await session.answer(make_call(*self._echo(conversation.messages), **changes))
        except CallRefusedError as refusal:
            assert refusal.kind in self.refusals  # noqa: PT017 - others are failures
            return
        record = session.book.records[answer.reply.provenance["record"]].trajectory
        context = record.input_ids[: answer.reply.usage.prompt_tokens].tolist()
        if conversation.context and self.keeps_context and not self._has_twin(conversation):
            assert conversation.context == context[: len(conversation.context)]
            self.num_extended += 1
        answer.confirm()
        self._take(conversation, answer.reply, context)

    def _has_twin(self, conversation):
        """Return whether another conversation starts with the same messages, but for empty ones: nobody can tell."""
        own = _without_empty(conversation.messages)
        others = [_without_empty(each.messages) for each in self.conversations if each is not conversation]
        differs = any(len(own) != len(each.messages) for each in (conversation, *self.conversations))
        return differs and any(other[: len(own)] == own for other in others)

    def _take(self, conversation, reply, context):
        self.replies[reply.id] = reply
        conversation.context = [*context, *reply.token_ids.tolist()]
        conversation.messages += [as_message(reply), *(results_of(reply) or [user("Go on.")])]

    def _echo(self, messages):
        """Return messages in a form that a client may send: rewritten JSON, trimmed text, no reasoning."""
        return [self._changed(message) if message["role"] == "assistant" else message for message in messages]

    def _changed(self, message):
        message = json.loads(json.dumps(message))
        if self.choices.random() < 0.3:
            message.pop("reasoning_content", None)
        if self.choices.random() < 0.3 and self._is_known_without_ends(message["content"]):
            message["content"] = message["content"].strip()
        for call in message.get("tool_calls", ()):
            if (arguments := read_arguments(call["function"]["arguments"])) is None:
                continue  # a malformed call
            if self.choices.random() < 0.5:
                call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
            elif self.choices.random() < 0.5:
                compact = {key: int(value) if value == int(value) else value for key, value in arguments.items()}
                call["function"]["arguments"] = json.dumps(compact, separators=(",", ":"))
        return message

    def _is_known_without_ends(self, content):
        """Return whether a trimmed text tells the reply; \"\" may be the reply \"\" as well as the reply \" \"."""
        contents = {as_message(reply)["content"] for reply in self.replies.values()}
        return sum(each.strip() == content.strip() for each in contents) == 1

    async def _continue(self, session, conversation, number):
        await self._ask(session, conversation)

    async def _repeat(self, session, conversation, number):
        """Ask the same again after delivery."""
        other = conversation.fork()
        await self._ask(session, conversation)
        await self._ask(session, other)
        return [other]

    async def _undelivered(self, session, conversation, number):
        call = make_call(*conversation.messages)
        try:
            answer = await session.answer(call)
        except CallRefusedError:
            return
        answer.release()
        self.unread.append(answer.reply)
        if self.choices.random() < 0.7:
            again = await session.answer(call)
            assert again.reply is answer.reply
            record = session.book.records[again.reply.provenance["record"]].trajectory
            context = record.input_ids[: again.reply.usage.prompt_tokens].tolist()
            again.confirm()
            self._take(conversation, again.reply, context)

    async def _keyed(self, session, conversation, number):
        """Repeat a request with its key, while it is answered."""
        call = make_call(*conversation.messages, key=f"key {number}")
        async with asyncio.TaskGroup() as group:
            first = group.create_task(self._try(session, call))
            await asyncio.sleep(0)
            second = group.create_task(self._try(session, call))
        answers = [task.result() for task in (first, second) if task.result() is not None]
        assert len({answer.reply.id for answer in answers}) <= 1
        for answer in answers:
            record = session.book.records[answer.reply.provenance["record"]].trajectory
            context = record.input_ids[: answer.reply.usage.prompt_tokens].tolist()
            known = answer.reply.id in self.replies
            answer.confirm()
            if not known:
                self._take(conversation, answer.reply, context)

    async def _lost(self, session, conversation, number):
        """Lose a response after its last byte, and perhaps repeat the request."""
        call = make_call(*conversation.messages)
        try:
            answer = await session.answer(call)
        except CallRefusedError:
            return
        record = session.book.records[answer.reply.provenance["record"]].trajectory
        context = record.input_ids[: answer.reply.usage.prompt_tokens].tolist()
        answer.confirm()
        answer.lose()
        self.replies[answer.reply.id] = answer.reply
        if self.choices.random() < 0.7:
            again = await session.answer(call)
            assert again.reply is answer.reply
            again.confirm()
            self._take(conversation, again.reply, context)

    async def _try(self, session, call):
        try:
            return await session.answer(call)
        except CallRefusedError:
            return None

    async def _cut(self, session, conversation, number):
        call = asyncio.ensure_future(self._try(session, make_call(*conversation.messages)))
        for _ in range(self.choices.randrange(4)):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        if not call.cancelled() and call.result() is not None:
            call.result().release()
            self.unread.append(call.result().reply)

    async def _retry(self, session, conversation, number):
        """Leave a call at some moment, act otherwise perhaps, and send the marked retry, which may be left again."""
        messages = list(conversation.messages)
        await self._cut(session, conversation, number)
        if self.choices.random() < 0.3:
            await self._ask(session, conversation.fork())
        while self.choices.random() < 0.3:
            await self._cut(session, conversation, number)
        if conversation.messages == messages:
            await self._ask(session, conversation, headers={"x-stainless-retry-count": "1"})

    async def _edit(self, session, conversation, number):
        """Change a letter of a turn, or of a message of the environment."""
        other = Conversation(json.loads(json.dumps(conversation.messages)))
        message = self.choices.choice(other.messages)
        message["content"] = (message["content"] or "") + f" edited {number}"
        await self._ask(session, other)
        return [other]

    async def _compact(self, session, conversation, number):
        other = Conversation([user(f"Summary {number}: {conversation.messages[-1]['content']}")])
        await self._ask(session, other)
        return [other]

    async def _branch(self, session, conversation, number):
        """Continue an earlier place of a conversation in another way."""
        ends = [index for index, message in enumerate(conversation.messages) if message["role"] != "assistant"]
        end = self.choices.choice(ends)
        if conversation.messages[end]["role"] == "tool":
            return None
        other = Conversation([*conversation.messages[:end], user(f"Otherwise {number}.")])
        await self._ask(session, other)
        return [other]

    async def _parallel(self, session, conversation, number):
        others = [conversation.fork() for _ in range(3)]
        others[2].messages.append(user(f"And {number}."))
        async with asyncio.TaskGroup() as group:
            for other in others:
                group.create_task(self._ask(session, other))
        return others

    async def _title(self, session, conversation, number):
        await self._ask(session, Conversation([user(f"Title {number}")]), tools=())

    async def _empty(self, session, conversation, number):
        """Send an empty assistant message, as after a cut stream, unless it could be the echo of an empty reply."""
        if any(map(is_blank, self.unread)):
            return None
        other = Conversation([*conversation.messages, {"role": "assistant", "content": ""}], conversation.context)
        await self._ask(session, other)
        return [other]


def _without_empty(messages):
    return [each for each in messages if each["role"] != "assistant" or each["content"] or each.get("tool_calls")]


def check_trained_once(done, agent):
    """Every delivered sampled token is trained in exactly one record, with the ids and numbers of the engine."""
    for reply in agent.replies.values():
        number, start = reply.provenance["record"], reply.usage.prompt_tokens
        record = done.records[number]
        stop = start + len(reply.token_ids)
        response = slice(start - record.num_prompt_tokens, stop - record.num_prompt_tokens)
        assert reply.token_ids.tolist() == record.input_ids[start:stop].tolist()
        assert (record.origins[response] == Origin.ACTION).all()
        assert reply.logprobs.tolist() == record.logprobs[response].tolist()
    trained = sum(int(record.response_mask.sum()) for record in done.records)
    # An empty message in a conversation may be the client's own, or the echo of a blank reply whose delivery failed
    # later at the same place: the gateway cannot tell, and takes it for the echo.
    totals = {sum(len(reply.token_ids) for reply in agent.replies.values())}
    for reply in agent.unread:
        if is_blank(reply) and reply.id not in agent.replies:
            totals |= {total + len(reply.token_ids) for total in totals}
    assert trained in totals
    sampled = sum(len(answer.token_ids) for answer in done.run.answers)
    assert sampled == trained + done.counts.get("left_tokens", 0)


def is_blank(reply):
    """Return whether an empty message could be the echo of a reply."""
    return not reply.content.strip() and not reply.tool_calls
