"""
Finds the text that a chat template appends for new messages, on a probe conversation, and proves that it only appends.

The prover renders the whole probe conversation. The text after the probe's turn is the suffix. The text before it does
not matter, so appending also works with a template that rewrites history, for example one that drops the reasoning of
earlier turns; `DeltaTemplate.rewrites` records that. The proof asks, over several conversations and contents:

- does every new message appear, after the turn that it answers;
- is the suffix always the same: with tools and without, after reasoning, and late in a conversation;
- do the ids before the suffix and the ids of the suffix add up to the ids of the whole.

Not covered: a template that treats a content in a special way on grounds other than its own string literals (its
length, say) may pass for one that does not. `ConversationCheck` looks for those in real conversations.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cached_property

from attrs import evolve, frozen

from turnwise.errors import TemplateError
from turnwise_chat_templates.probe import (
    BASE,
    CONTENTS,
    REASON_MARK,
    TURN_MARK,
    Plain,
    Turn,
    adversarial_contents,
    contexts,
    excerpt,
    inline_reasoning,
    probe_messages,
    renamed,
    rotations,
    separate_reasoning,
    turns,
)
from turnwise_chat_templates.render import HuggingFaceTokenizer, Renderer

Fill = Callable[[str], str]
Span = tuple[int, int]


def _json_body(content: str) -> str:
    return json.dumps(content, ensure_ascii=False)[1:-1]


_FILLS: tuple[Fill, ...] = (str, str.strip, _json_body)
"""The changes that templates make to a content: none, `trim`, `tojson`."""


@frozen(kw_only=True)
class DeltaTemplate:
    """
    The text that a template appends to a turn of the model for messages of certain roles.

    Attributes:
        roles: of the new messages.
        turn: the probe's assistant message.
        num_marks: occurrences of the mark in the probe's turn.
        end: text of the end-of-turn token that the template renders before the messages.
        num_ends: occurrences of `end` after the last mark up to the one that ends the turn, mostly one.
        closing: text that closes a truncated turn; it ends with `end`.
        stop: text of the end-of-turn token that the model samples, mostly `end`.
        others_close: any stop token closes the turn, because `end` does not depend on the following text.
        pieces: text around each content, one more than there are roles; None when a rendering depends on more.
        fills: the change that each content between the pieces gets.
        needs: keys besides role and content that the rendering shows.
        moves_tools: the reason why it cannot append to a prompt with tools; empty when it can.
        rewrites: the change that the template makes to earlier turns; empty when it keeps the sampled text.
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
    moves_tools: str = ""
    rewrites: str = ""

    def fill(self, contents: Sequence[str]) -> str:
        """Return the text after `end` by concatenation; `pieces` must not be None."""
        pieces = self.pieces or ()
        filled = [fill(content) + piece for fill, content, piece in zip(self.fills, contents, pieces[1:], strict=True)]
        return pieces[0] + "".join(filled)

    def suffix(self, whole: str) -> str:
        """Return the text after `end` in a rendering of the whole probe conversation, which must show its turn."""
        # Split from the front: new messages may quote the mark, and they come after it.
        return self.behind_end(whole.split(TURN_MARK, self.num_marks)[-1])

    def behind_turn(self, whole: str) -> str:
        """Return the text after `end` in a rendering of any conversation that ends with the probe's turn."""
        return self.behind_end(whole.rpartition(TURN_MARK)[2])

    def behind_end(self, tail: str) -> str:
        """Return the text after `end` from the text after the probe's turn."""
        parts = tail.split(self.end, self.num_ends)
        if len(parts) <= self.num_ends:
            raise TemplateError(f"the template ends a turn differently before these messages: {excerpt(tail)}")
        return parts[-1]

    def start(self, last_token: str | None) -> str:
        """
        Return the text before the suffix: `end`, where encoding starts, then the text that closes the turn.

        `last_token` is the text of the record's last token if it is a stop token.
        """
        if last_token in (self.end, self.stop):
            return self.end
        if last_token is not None and last_token in self.closing:
            return self.end + self.closing.partition(last_token)[2]
        if last_token is not None and self.others_close:
            return self.end
        return self.end + self.closing


class DeltaProver:
    """Finds and proves the templates of one template and tokenizer."""

    def __init__(self, renderer: Renderer, tokenizer: HuggingFaceTokenizer) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer

    def find(self, roles: Sequence[str]) -> DeltaTemplate:
        """Return the template of messages of these roles; `TemplateError` names the roles and the difference."""
        if not roles or "assistant" in roles:
            raise TemplateError("a delta takes messages of the environment, at least one; the model's are sampled")
        problem = ""
        try:
            for turn in turns(roles):
                try:
                    template = self._locate(tuple(roles), turn)
                except TemplateError as error:
                    problem = problem or str(error)
                else:
                    return self._prove(template)
        except TemplateError as error:
            problem = str(error)
        name = self._renderer.name
        raise TemplateError(f"{name} cannot append {describe(roles)}: {problem.replace(name, 'it', 1)}")

    def whole(self, template: DeltaTemplate, messages: Sequence[Plain]) -> str:
        """Return the rendering of the probe conversation and these messages, with the generation prompt."""
        return self._renderer.render([*BASE, template.turn.message(messages), *messages])

    def _locate(self, roles: tuple[str, ...], turn: Turn) -> DeltaTemplate:
        """Return the template as the simplest probe shows it."""
        messages = probe_messages(roles)
        before = [*BASE, turn.message()]
        tail, num_marks = _tail(self._renderer.render([*before, *messages]), messages)
        short = self._renderer.render(before, generate=False).rpartition(TURN_MARK)[2]
        (start, end), stop = self._end_of_turn(short, tail)
        first = tail.index(messages[0]["content"])
        if not 0 < end <= first:
            raise TemplateError("no special token separates them from the turn of the model")
        text = tail[start:end]
        return DeltaTemplate(
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
        Return the span of the end-of-turn token in the tail, and the stop token's text where the two differ.

        The texts follow the turn: `short` when nothing comes after it, `tail` when the new messages do.
        """
        short_spans = self._tokenizer.special_spans(short)
        for span in reversed(short_spans):
            if tail.startswith(short[: span[1]]):
                return span, ""
        # A last turn ends in another way than the others, or with nothing at all.
        stop = short[slice(*short_spans[0])] if short_spans else ""
        return next(iter(self._tokenizer.special_spans(tail)), (0, 0)), stop

    def _prove(self, template: DeltaTemplate) -> DeltaTemplate:
        """Return the template with all that its proof finds out."""
        messages = probe_messages(template.roles)
        suffix = template.suffix(self.whole(template, messages))
        template = evolve(template, moves_tools=self._prove_contexts(template, messages, suffix))
        samples = self._sample(template, CONTENTS, prove_ids=True)
        changing = (key for key in ("name", "tool_call_id") if self._shows(template, messages, key, suffix))
        template = evolve(template, needs=frozenset(changing), rewrites=self._rewrites(template, messages))
        return template if template.needs else self._with_pieces(template, messages, suffix, samples)

    def _prove_contexts(self, template: DeltaTemplate, messages: Sequence[Plain], expected: str) -> str:
        """Return how the suffix differs when tools are given, or an empty text; raise for other differences."""
        moves_tools = ""
        for context, before, tools in contexts(template.turn, template.roles):
            try:
                whole = self._renderer.render([*before, *messages], tools)
            except TemplateError:
                # A conversation that the template refuses as a whole never gets as far as new messages.
                continue
            suffix = template.behind_end(_tail(whole, messages)[0])
            if suffix != expected:
                problem = f"they read differently {context}: {excerpt(suffix, expected)}"
                if not tools:
                    raise TemplateError(problem)
                moves_tools = f"{self._renderer.name} cannot append {describe(template.roles)}: {problem}"
        return moves_tools

    def _sample(
        self, template: DeltaTemplate, contents: Sequence[str], *, prove_ids: bool
    ) -> list[tuple[list[str], str]]:
        """Return renderings of the template: the contents of its messages, and its suffix."""
        samples = []
        for texts in rotations(len(template.roles), contents):
            whole = self.whole(template, probe_messages(template.roles, texts))
            suffix = template.suffix(whole)
            if prove_ids:
                self._prove_ids(template.end, whole, suffix)
            samples.append((texts, suffix))
        return samples

    def _prove_ids(self, end: str, whole: str, suffix: str) -> None:
        encode = self._tokenizer.encode
        before = whole[: len(whole) - len(suffix)]
        if len(encode(end)) != 1 or encode(before) + encode(end + suffix)[1:] != encode(whole):
            raise TemplateError(f"their ids depend on the text before them: {excerpt(suffix)}")

    def _shows(self, template: DeltaTemplate, messages: Sequence[Plain], key: str, suffix: str) -> bool:
        return template.suffix(self.whole(template, renamed(messages, key))) != suffix

    def _rewrites(self, template: DeltaTemplate, messages: Sequence[Plain]) -> str:
        """Return the change that the template makes to an earlier turn, as the text of a warning."""
        prompt = self._renderer.render(BASE)
        # A prompt that opens the reasoning is kept only in front of a turn that has some.
        turn = inline_reasoning(template.turn) if prompt.rstrip().endswith("<think>") else template.turn.message()
        whole = self._renderer.render([*BASE, turn, *messages])
        if not whole.startswith(prompt):
            return f"renders the prompt of an earlier turn as {excerpt(whole, prompt)}"
        if whole.count(TURN_MARK) < template.turn.num_calls + template.turn.content:
            return "drops the text or the calls of an earlier turn"
        return "drops the reasoning of an earlier turn" if self._drops_reasoning(template.turn, messages) else ""

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
        self, template: DeltaTemplate, messages: Sequence[Plain], suffix: str, samples: Sequence[tuple[list[str], str]]
    ) -> DeltaTemplate:
        """Return the template with pieces, if concatenation provably gives the same text as rendering."""
        pieces = _split(suffix, [message["content"] for message in messages])
        if pieces is None:
            return template
        try:
            more = self._sample(template, self._adversarial_contents, prove_ids=False)
        except TemplateError:
            return template
        kinds = list(dict.fromkeys(template.roles))
        for chosen in itertools.product(_FILLS, repeat=len(kinds)):
            filled = evolve(template, pieces=pieces, fills=tuple(chosen[kinds.index(role)] for role in template.roles))
            if all(filled.fill(texts) == expected for texts, expected in (*samples, *more)):
                return filled
        return template

    @cached_property
    def _adversarial_contents(self) -> tuple[str, ...]:
        return adversarial_contents(self._renderer.sources)


def _tail(whole: str, messages: Sequence[Plain]) -> tuple[str, int]:
    """Return the text after the probe's turn, and the number of marks in the turn."""
    before, found, tail = whole.rpartition(TURN_MARK)
    for message in messages:
        if message["content"] not in whole:
            raise TemplateError(f"it leaves out the content of a {message['role']} message")
        if found and message["content"] not in tail:
            raise TemplateError(f"it puts a {message['role']} message before the turn that it answers")
    if not found:
        raise TemplateError("it leaves out the turn of the model before them")
    return tail, before.count(TURN_MARK) + 1


def _split(suffix: str, marks: Sequence[str]) -> tuple[str, ...] | None:
    """Return the text around each mark, or None unless each shows once, in order."""
    pieces = []
    for mark in marks:
        piece, found, suffix = suffix.partition(mark)
        if not found or any(other in piece for other in marks):
            return None
        pieces.append(piece)
    return None if any(mark in suffix for mark in marks) else (*pieces, suffix)


def describe(roles: Sequence[str]) -> str:
    """Return a name for new messages of these roles, for error texts."""
    return " and ".join(f"a {role} message" for role in roles)
