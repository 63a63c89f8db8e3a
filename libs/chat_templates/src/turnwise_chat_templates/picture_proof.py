"""
Proof that a template appends messages with pictures as it appends texts.

It starts from the proved template of texts of the same roles. For each shape of contents, such as a text and a picture,
the suffix must be the same in all contexts, also behind earlier pictures, which some templates count; it must show each
part; and its ids must be those of the whole, with real placeholders.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from attrs import define, field, frozen

from turnwise.errors import TemplateError
from turnwise.media import Picture
from turnwise_chat_templates.delta import DeltaProver, DeltaTemplate, describe
from turnwise_chat_templates.picture_parts import Shape, shape_of, texts_of, with_shape
from turnwise_chat_templates.pictures import Placeholders
from turnwise_chat_templates.probe import Plain, contexts, excerpt, probe_messages
from turnwise_chat_templates.render import HuggingFaceTokenizer, Renderer

_MAX_SHAPES = 512
_SIZES = ((32, 48), (60, 33))


@frozen
class _Proved:
    """The result for a shape: why it cannot be appended, and why not to a prompt with tools; empty if it can."""

    problem: str = ""
    moves_tools: str = ""


@define(eq=False)
class PictureProver:
    """
    Proves shapes of contents, each once.

    Attributes:
        renderer: of the template.
        tokenizer: of the model.
        placeholders: of the model.
        prover: of texts.
    """

    renderer: Renderer
    tokenizer: HuggingFaceTokenizer
    placeholders: Placeholders
    prover: DeltaProver
    _proved: dict[object, _Proved] = field(factory=dict, init=False)

    def prove(self, template: DeltaTemplate, messages: Sequence[Plain], *, with_tools: bool) -> None:
        """Raise `TemplateError` unless the template appends plain messages of the shapes of the given ones."""
        shapes = tuple(map(shape_of, messages))
        key = (template.roles, shapes)
        proved = self._proved.get(key)
        if proved is None:
            try:
                proved = _Proved(moves_tools=self._prove(template, shapes))
            except TemplateError as error:
                proved = _Proved(problem=f"{self.renderer.name} cannot append {describe(template.roles)}: {error}")
            if len(self._proved) >= _MAX_SHAPES:
                self._proved.clear()
            self._proved[key] = proved
        if problem := proved.problem or (proved.moves_tools if with_tools else ""):
            raise TemplateError(problem)

    def _prove(self, template: DeltaTemplate, shapes: Sequence[Shape]) -> str:
        plain = probe_messages(template.roles)
        messages = [with_shape(message, shape) for message, shape in zip(plain, shapes, strict=True)]
        whole = self.prover.whole(template, messages)
        suffix = template.suffix(whole)
        num_pictures = sum(shape.count("image") for shape in shapes if shape)
        if (shown := suffix.count(self.placeholders.image_token)) != num_pictures:
            raise TemplateError(f"it shows {shown} pictures of {num_pictures}")
        for message in messages:
            if hidden := next((text for text in texts_of(message) if text not in suffix), None):
                raise TemplateError(f"it leaves out the text {hidden!r} beside a picture")
        self._prove_ids(template.end, whole, suffix)
        return self._prove_contexts(template, messages, suffix)

    def _prove_contexts(self, template: DeltaTemplate, messages: Sequence[Plain], expected: str) -> str:
        moves_tools = ""
        seen: Plain = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "probe"}]}
        earlier: tuple[str, list[Plain], list[Plain]] = (
            "after a picture",
            [seen, {"role": "assistant", "content": "probe"}, seen, template.turn.message()],
            [],
        )
        for context, before, tools in (*contexts(template.turn, template.roles), earlier):
            try:
                whole = self.renderer.render([*before, *messages], tools)
            except TemplateError:
                continue  # as in the proof of texts
            suffix = template.behind_turn(whole)
            if suffix != expected:
                problem = f"they read differently {context}: {excerpt(suffix, expected)}"
                if not tools:
                    raise TemplateError(problem)
                moves_tools = f"{self.renderer.name} cannot append {describe(template.roles)}: {problem}"
        return moves_tools

    def _prove_ids(self, end: str, whole: str, suffix: str) -> None:
        samples = [self.placeholders.expand(_sample(*size)) for size in _SIZES]
        token, encode = self.placeholders.image_token, self.tokenizer.encode

        def fill(text: str) -> str:
            return self.placeholders.fill(text, [samples[i % len(samples)] for i in range(text.count(token))])

        before = whole[: len(whole) - len(suffix)]
        if encode(fill(before)) + encode(end + fill(suffix))[1:] != encode(fill(before) + fill(suffix)):
            raise TemplateError(f"their ids depend on the text before them: {excerpt(suffix)}")


def _sample(width: int, height: int) -> Picture:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return Picture(data=file.getvalue(), media_type="image/png")
