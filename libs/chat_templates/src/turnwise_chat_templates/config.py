"""Options of the registered chats."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Final, Literal

from attrs import field, frozen, validators

from turnwise.options import SpecialTokenPolicy

ToolPlace = Literal["template", "system_prompt"]
MAX_PICTURE_PIXELS: Final = 1 << 25
"""Default of `JinjaConfig.max_picture_pixels`: 33 million."""
ReasoningEffort = Literal["low", "medium", "high"]


def read_date(value: str | None) -> str:
    """Return a date in the form of ISO 8601; None is today, in UTC. `ValueError` for a text that is no date."""
    return (datetime.now(UTC).date() if value is None else date.fromisoformat(value)).isoformat()


@frozen(kw_only=True)
class JinjaConfig:
    """
    Options of the chat `jinja`, which renders a model's own chat template.

    Attributes:
        special_tokens_in_content: treatment of special tokens that the messages of a task, tools or users spell:
            `text` encodes them as ordinary text, `refuse` fails the episode, and `parse` lets them act as the
            template's own.
        check_every: one episode in so many is compared with the template's rendering of its whole conversation, for
            templates with rules by length or position; 0 compares none.
        tools: `template` leaves it to the chat template to show tools; `system_prompt` writes them, their calls and
            their results as texts, in the format of the run's parser, for templates that show none.
        max_picture_pixels: most pixels of a picture in a message; a larger one fails the episode before it is decoded.
    """

    special_tokens_in_content: SpecialTokenPolicy = "text"
    check_every: int = field(default=64, validator=validators.ge(0))
    tools: ToolPlace = "template"
    max_picture_pixels: int = field(default=MAX_PICTURE_PIXELS, validator=validators.ge(1))


@frozen(kw_only=True)
class HarmonyConfig:
    """
    Options of the chat `harmony`, which writes the format of gpt-oss without a template.

    Attributes:
        special_tokens_in_content: as in `jinja`.
        reasoning_effort: the effort that the system message asks for.
        model_identity: first line of the system message.
        knowledge_cutoff: as the system message tells it.
        date: the current date of the system message, such as `"2026-05-31"`. null is the day on which the config of a
            run is resolved, in UTC; the resolved config holds it, so workers and a resumed run show the same one.
    """

    special_tokens_in_content: SpecialTokenPolicy = "text"
    reasoning_effort: ReasoningEffort = "medium"
    model_identity: str = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str = "2024-06"
    date: str | None = field(default=None, converter=read_date)
