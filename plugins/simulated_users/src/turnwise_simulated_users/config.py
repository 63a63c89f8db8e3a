"""Options of the simulated users."""

from __future__ import annotations

from typing import Final

from attrs import field, frozen, validators

INSTRUCTIONS: Final = """\
You are a user who talks to an assistant. Play this user, and never the assistant.

{goal}

Rules:
- Write one short message at a time, as a user does. Write nothing but the message.
- Do not tell everything at once. Answer questions of the assistant from the instruction above.
- Do not make up facts that the instruction does not have. If it does not say, you do not know.
- When the goal is reached, or when the assistant cannot reach it, write {stop} and nothing else."""
"""Follows the instructions of the user of tau-bench (Yao et al., 2024, https://arxiv.org/abs/2406.12045, appendix)."""


@frozen(kw_only=True)
class ScriptedUserConfig:
    """
    A user who says the same to every answer.

    Attributes:
        replies: messages in the order in which they are said; the conversation ends after the answer to the last one.
            A task's own column `column` replaces them.
        column: of the task, a list of texts.
        stop_when: texts of which one in an answer ends the conversation, in any case of letters.
    """

    replies: tuple[str, ...] = ()
    column: str = field(default="user_replies", validator=validators.min_len(1))
    stop_when: tuple[str, ...] = field(
        default=(), validator=validators.deep_iterable(member_validator=validators.min_len(1))
    )


def _has_places(_instance: object, attribute: object, value: str) -> None:
    missing = [place for place in ("{goal}", "{stop}") if place not in value]
    if missing:
        raise ValueError(f"'instructions' must contain {' and '.join(missing)}")


@frozen(kw_only=True)
class ModelUserConfig:
    """
    A user whom the run's judge model plays.

    Attributes:
        goal: the user's situation and wish; a task's own column `column` replaces it.
        column: of the task, a text.
        instructions: system message of the user's model; `{goal}` and `{stop}` are replaced.
        stop: text in a message of the user that ends the conversation.
        max_replies: most messages of the user; the conversation ends after the answer to the last one. Null sets no
            limit.
        max_reply_length: most characters of a message, from its start.
    """

    goal: str = ""
    column: str = field(default="user_goal", validator=validators.min_len(1))
    instructions: str = field(default=INSTRUCTIONS, validator=_has_places)
    stop: str = field(default="###STOP###", validator=validators.min_len(1))
    max_replies: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    max_reply_length: int = field(default=2000, validator=validators.ge(1))
