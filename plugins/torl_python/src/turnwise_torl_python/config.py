"""Options of the agent `torl_python` and of the reward `torl_math`."""

from __future__ import annotations

from typing import Final, Literal

from attrs import Attribute, field, frozen, validators

QUESTION_MARK: Final = "[PROMPT]"
"""Stands for the question in a plain prompt."""

INSTRUCTION: Final = (
    "Please integrate natural language reasoning with programs to solve the problem above, "
    "and put your final answer within \\boxed{}."
)

TORL_PROMPT: Final = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it.\n"
    f"User: {INSTRUCTION}\n{QUESTION_MARK}\nAssistant:\n"
)
"""ToRL's template `tir_base_0309`."""


@frozen(kw_only=True)
class TorlPythonConfig:
    r"""
    How programs are asked for, and what of their output the model sees.

    Attributes:
        max_tool_calls: output blocks that are answered; the model then has one more turn.
        errors: what the model sees of a program that failed: the `last_line` of what the tool says, as in ToRL, or the
            `whole` of it, tracebacks included.
        max_output_chars: characters of output that are kept, one half from the head and one from the tail, with `...`
            between; null keeps all.
        empty_output: what is shown of a program that printed nothing.
        no_code_output: what is shown where an output block was opened without a complete python block before it.
        template: `torl` makes a plain prompt of the question; `chat` uses the model's chat template.
        plain_prompt: the plain prompt, with `[PROMPT]` where the question goes.
        system_prompt: put first in conversations that have no system message; for the template `chat` only.
        tool: name of the tool that runs the code; it takes one argument, `code`.
    """

    max_tool_calls: int = field(default=3, validator=validators.ge(0))
    errors: Literal["last_line", "whole"] = field(default="last_line", validator=validators.in_(("last_line", "whole")))
    max_output_chars: int | None = field(default=256)
    empty_output: str = "(no output)"
    no_code_output: str = "Error: there is no complete ```python block before this output"
    template: Literal["torl", "chat"] = field(default="torl", validator=validators.in_(("torl", "chat")))
    plain_prompt: str = field(default=TORL_PROMPT)
    system_prompt: str = INSTRUCTION.replace(" above", "")
    tool: str = field(default="python", validator=validators.min_len(1))

    @max_output_chars.validator
    def _check_max_output_chars(self, _attribute: Attribute[int | None], value: int | None) -> None:
        if value is not None and value < 2:
            raise ValueError(f"'max_output_chars' must be at least 2, or null: {value}")

    @plain_prompt.validator
    def _check_plain_prompt(self, _attribute: Attribute[str], value: str) -> None:
        if value.count(QUESTION_MARK) != 1:
            raise ValueError(f"'plain_prompt' must hold {QUESTION_MARK} once")


@frozen(kw_only=True)
class TorlMathConfig:
    r"""
    What an answer is worth: 1 if the last `\boxed{}` equals the ground truth, -1 otherwise.

    Attributes:
        error_penalty: added when the model wrote code and no call of the episode ran without error; -0.5 in ToRL's
            ablation, 0 in its main runs.
        timeout_s: seconds for comparing one answer; one that takes longer is wrong.
        processes: answers that are compared at the same time, each in a process of its own.
    """

    error_penalty: float = field(default=0.0, validator=validators.le(0))
    timeout_s: float = field(default=5.0, validator=validators.gt(0))
    processes: int = field(default=2, validator=validators.ge(1))
