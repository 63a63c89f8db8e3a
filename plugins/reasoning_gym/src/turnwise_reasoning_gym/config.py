"""Options of the reward `reasoning_gym`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen, validators

Extraction = Literal["auto", "tag", "text", "number"]


@frozen(kw_only=True)
class RewardConfig:
    """
    How an answer is found and scored.

    Attributes:
        answer: `tag` takes the text between the last `<answer>` and `</answer>`; `text` the whole last message of the
            model, without what is before `</think>`; `number` the last number in it; `auto` the tag if there is one,
            else the text.
        timeout_s: longest scoring of one answer in seconds of the processor; an answer that takes longer scores 0.
        processes: most processes that score for one worker.
    """

    answer: Extraction = "auto"
    timeout_s: float = field(default=10.0, validator=validators.gt(0))
    processes: int = field(default=1, validator=validators.ge(1))
