"""
How a chat template joins new messages to a turn of the model: found on a probe conversation, then proven.

The probe is rendered whole, and what stands behind the probe's turn is the joint. What stands before it does not
matter, so a template that rewrites history (one that drops the reasoning of earlier turns, say) can still be appended
to; that it does is kept in `Joint.rewrites`. The proof asks, over several conversations and contents:

- does every new message show up, behind the turn that it answers;
- is the joint always the same: with tools and without, after reasoning, and late in a conversation;
- do the ids before the joint and the ids of the joint make up the ids of the whole.

Not covered: a template that treats a content in a special way on grounds other than its own string literals (its
length, say) may pass for one that does not.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cached_property

from attrs import evolve, frozen

from turnwise.chat_probe import (
    BASE,
    CONTENTS,
    REASON_MARK,
    TURN_MARK,
    Plain,
    Turn,
    contexts,
    excerpt,
    inline_reasoning,
    probe_messages,
    renamed,
    rotations,
    separate_reasoning,
    telling_contents,
    turns,
)
from turnwise.chat_render import HuggingFaceTokenizer, Renderer
from turnwise.errors import TemplateError

Fill = Callable[[str], str]
Span = tuple[int, int]


def _verbatim(content: str) -> str:
    return content


def _json_body(content: str) -> str:
    return json.dumps(content, ensure_ascii=False)[1:-1]


_FILLS: tuple[Fill, ...] = (_verbatim, str.strip, _json_body)
"""What templates make of a content: nothing, `trim`, `tojson`."""


@frozen(kw_only=True)
class Joint:
    """
    How messages of certain roles join a turn of the model.

    Attributes:
        roles: of the new messages.
        turn: the probe's assistant message.
        num_marks: how often the probe's turn shows its mark.
        end: text of the end-of-turn token that the template renders before the messages.
        num_ends: how often `end` shows behind the last mark until it ends the turn, mostly once.
        closing: what closes a turn that was cut; it ends with `end`.
        stop: text of the end-of-turn token that the model samples, mostly `end`.
        others_close: any stop token closes the turn, since `end` says nothing about what follows.
        pieces: text around each content, one more than there are roles; None when a rendering depends on more.
        fills: what becomes of each content between the pieces.
        needs: keys beside role and content that the rendering shows.
        rewrites: what the template does to history before the joint; empty when it keeps what was sampled.
    """

    roles: tuple[str, ...]
    turn: Turn
    num_marks: int
    end: str
    num_ends: int
    closing: str
    stop: str
    others_close: bool
    pieces: tuple[str, ...] | None = None
    fills: tuple[Fill, ...] = ()
    needs: frozenset[str] = frozenset()
    rewrites: str = ""

    def fill(self, contents: Sequence[str]) -> str:
        """Return the text behind `end` by concatenation; `pieces` must not be None."""
        pieces = self.pieces or ()
        filled = [fill(content) + piece for fill, content, piece in zip(self.fills, contents, pieces[1:], strict=True)]
        return pieces[0] + "".join(filled)

    def opening(self, whole: str) -> str:
        """
        Return the text behind `end` out of a rendering of the whole probe conversation.

        Raises:
            TemplateError: the rendering does not show the probe's turn as it should.
        """
        # Split from the front: new messages may quote the mark, and they come behind it.
        return self.behind_end(whole.split(TURN_MARK, self.num_marks)[-1])

    def behind_end(self, tail: str) -> str:
        """Return the text behind `end` out of the text behind the probe's turn."""
        parts = tail.split(self.end, self.num_ends)
        if len(parts) <= self.num_ends:
            raise TemplateError(f"the template ends a turn differently before these messages: {excerpt(tail)}")
        return parts[-1]

    def start(self, last_token: str | None) -> str:
        """
        Return the text before the opening: `end`, the anchor that encoding begins at, then what closes the turn.

        Args:
            last_token: text of the record's last token if it is a stop token, else None.
        """
        if last_token in (self.end, self.stop):
            return self.end
        if last_token is not None and last_token in self.closing:
            return self.end + self.closing.partition(last_token)[2]
        if last_token is not None and self.others_close:
            return self.end
        return self.end + self.closing


class JointFinder:
    """Finds and proves the joints of one template and tokenizer."""

    def __init__(self, renderer: Renderer, tokenizer: HuggingFaceTokenizer) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer

    def find(self, roles: Sequence[str]) -> Joint:
        """
        Return how messages of these roles join.

        Raises:
            TemplateError: they cannot be appended; the text says which kind of message and what disagrees.
        """
        problem = ""
        try:
            for turn in turns(roles):
                try:
                    joint = self._locate(tuple(roles), turn)
                except TemplateError as error:
                    problem = problem or str(error)
                else:
                    return self._prove(joint)
        except TemplateError as error:
            problem = str(error)
        name = self._renderer.name
        raise TemplateError(f"{name} cannot append {describe(roles)}: {problem.replace(name, 'it', 1)}")

    def whole(self, joint: Joint, messages: Sequence[Plain]) -> str:
        """Return the rendering of the probe conversation and these messages, with the generation prompt."""
        return self._renderer.render([*BASE, joint.turn.message(messages), *messages])

    def _locate(self, roles: tuple[str, ...], turn: Turn) -> Joint:
        """Return the joint as the simplest probe shows it."""
        messages = probe_messages(roles)
        before = [*BASE, turn.message()]
        tail, num_marks = _tail(self._renderer.render([*before, *messages]), messages)
        short = self._renderer.render(before, generate=False).rpartition(TURN_MARK)[2]
        (start, end), stop = self._end_of_turn(short, tail)
        first = tail.index(messages[0]["content"])
        if not 0 < end <= first:
            raise TemplateError("no special token separates them from the turn of the model")
        text = tail[start:end]
        return Joint(
            roles=roles,
            turn=turn,
            num_marks=num_marks,
            end=text,
            num_ends=tail[:end].count(text),
            closing=tail[start if turn.num_calls else 0 : end],
            stop=stop or text,
            # Where no other special token follows, `end` itself opens the message: GLM's turns end that way.
            others_close=bool(self._tokenizer.special_spans(tail[end:first]))
            and (turn.num_calls == 0 or text == self._plain_end),
        )

    @cached_property
    def _plain_end(self) -> str:
        """Text of the token that ends a turn without calls; empty when there is none."""
        try:
            return self._locate(("user",), Turn()).end
        except TemplateError:
            return ""

    def _end_of_turn(self, short: str, tail: str) -> tuple[Span, str]:
        """
        Return the span of the end-of-turn token in the tail, and the stop token's text where that is another.

        Args:
            short: text behind the turn when nothing follows it.
            tail: text behind the turn when the new messages follow.
        """
        short_spans = self._tokenizer.special_spans(short)
        for span in reversed(short_spans):
            if tail.startswith(short[: span[1]]):
                return span, ""
        # A last turn ends in another way than the others, or with nothing at all.
        stop = short[slice(*short_spans[0])] if short_spans else ""
        return next(iter(self._tokenizer.special_spans(tail)), (0, 0)), stop

    def _prove(self, joint: Joint) -> Joint:
        """Return the joint with all that its proof finds out."""
        messages = probe_messages(joint.roles)
        opening = joint.opening(self.whole(joint, messages))
        self._prove_contexts(joint, messages, opening)
        samples = self._sample(joint, CONTENTS, prove_ids=True)
        changing = (key for key in ("name", "tool_call_id") if self._shows(joint, messages, key, opening))
        joint = evolve(joint, needs=frozenset(changing), rewrites=self._rewrites(joint, messages))
        return joint if joint.needs else self._with_pieces(joint, messages, opening, samples)

    def _prove_contexts(self, joint: Joint, messages: Sequence[Plain], expected: str) -> None:
        for context, before, tools in contexts(joint.turn, joint.roles):
            try:
                whole = self._renderer.render([*before, *messages], tools)
            except TemplateError:
                # A conversation that the template refuses as a whole never gets as far as new messages.
                continue
            opening = joint.behind_end(_tail(whole, messages)[0])
            if opening != expected:
                raise TemplateError(f"they read differently {context}: {excerpt(opening, expected)}")

    def _sample(self, joint: Joint, contents: Sequence[str], *, prove_ids: bool) -> list[tuple[list[str], str]]:
        """Return renderings of the joint: the contents of its messages, and its opening."""
        samples = []
        for texts in rotations(len(joint.roles), contents):
            whole = self.whole(joint, probe_messages(joint.roles, texts))
            opening = joint.opening(whole)
            if prove_ids:
                self._prove_ids(joint.end, whole, opening)
            samples.append((texts, opening))
        return samples

    def _prove_ids(self, end: str, whole: str, opening: str) -> None:
        encode = self._tokenizer.encode
        before = whole[: len(whole) - len(opening)]
        if len(encode(end)) != 1 or encode(before) + encode(end + opening)[1:] != encode(whole):
            raise TemplateError(f"their ids depend on what stands before them: {excerpt(opening)}")

    def _shows(self, joint: Joint, messages: Sequence[Plain], key: str, opening: str) -> bool:
        return joint.opening(self.whole(joint, renamed(messages, key))) != opening

    def _rewrites(self, joint: Joint, messages: Sequence[Plain]) -> str:
        """Return what the template does to an earlier turn, in the words of a warning."""
        prompt = self._renderer.render(BASE)
        # A prompt that opens the reasoning is kept only in front of a turn that has some.
        turn = inline_reasoning(joint.turn) if prompt.rstrip().endswith("<think>") else joint.turn.message()
        whole = self._renderer.render([*BASE, turn, *messages])
        if not whole.startswith(prompt):
            return f"renders the prompt of an earlier turn as {excerpt(whole, prompt)}"
        if whole.count(TURN_MARK) < joint.turn.num_calls + joint.turn.content:
            return "drops the text or the calls of an earlier turn"
        return "drops the reasoning of an earlier turn" if self._drops_reasoning(joint.turn, messages) else ""

    def _drops_reasoning(self, turn: Turn, messages: Sequence[Plain]) -> bool:
        inline, separate = [*BASE, inline_reasoning(turn)], [*BASE, separate_reasoning(turn)]
        try:
            kept = REASON_MARK in self._renderer.render([*inline, *messages]) or not turn.content
            shown = REASON_MARK in self._renderer.render(separate, generate=False)
            return not kept or (shown and REASON_MARK not in self._renderer.render([*separate, *messages]))
        except TemplateError:
            # Reasoning that the template refuses is none that it drops.
            return False

    def _with_pieces(
        self, joint: Joint, messages: Sequence[Plain], opening: str, samples: Sequence[tuple[list[str], str]]
    ) -> Joint:
        """Return the joint with its pieces, if concatenation is proven to give what the template gives."""
        pieces = _split(opening, [message["content"] for message in messages])
        if pieces is None:
            return joint
        try:
            more = self._sample(joint, self._telling_contents, prove_ids=False)
        except TemplateError:
            return joint
        kinds = list(dict.fromkeys(joint.roles))
        for chosen in itertools.product(_FILLS, repeat=len(kinds)):
            filled = evolve(joint, pieces=pieces, fills=tuple(chosen[kinds.index(role)] for role in joint.roles))
            if all(filled.fill(texts) == expected for texts, expected in (*samples, *more)):
                return filled
        return joint

    @cached_property
    def _telling_contents(self) -> tuple[str, ...]:
        return telling_contents(self._renderer.sources)


def _tail(whole: str, messages: Sequence[Plain]) -> tuple[str, int]:
    """Return the text behind the probe's turn, and how often the turn shows its mark."""
    before, found, tail = whole.rpartition(TURN_MARK)
    for message in messages:
        if message["content"] not in whole:
            raise TemplateError(f"it leaves out the content of a {message['role']} message")
        if found and message["content"] not in tail:
            raise TemplateError(f"it puts a {message['role']} message before the turn that it answers")
    if not found:
        raise TemplateError("it leaves out the turn of the model before them")
    return tail, before.count(TURN_MARK) + 1


def _split(opening: str, marks: Sequence[str]) -> tuple[str, ...] | None:
    """Return the text around each mark, or None unless each shows once, in order."""
    pieces = []
    for mark in marks:
        piece, found, opening = opening.partition(mark)
        if not found or any(other in piece for other in marks):
            return None
        pieces.append(piece)
    return None if any(mark in opening for mark in marks) else (*pieces, opening)


def describe(roles: Sequence[str]) -> str:
    """Return what error texts call new messages of these roles."""
    return " and ".join(f"a {role} message" for role in roles)
