"""Options of the agent `torl_python` and of the reward `torl_math`."""

from __future__ import annotations

from typing import Final, Literal

from attrs import Attribute, field, frozen, validators

QUESTION_PLACEHOLDER: Final = "[PROMPT]"
"""A plain prompt has it in place of the question."""

INSTRUCTION: Final = (
    "Please integrate natural language reasoning with programs to solve the problem above, "
    "and put your final answer within \\boxed{}."
)

TORL_PROMPT: Final = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it.\n"
    f"User: {INSTRUCTION}\n{QUESTION_PLACEHOLDER}\nAssistant:\n"
)
"""ToRL's template `tir_base_0309`."""


@frozen(kw_only=True)
class TorlPythonConfig:
    r"""
    Prompt, limits, and format of outputs.

    Attributes:
        max_tool_calls: most outputs of an episode; after the last one the model has one more turn.
        errors: output of a program that failed: the `last_line` of the tool's text, as in ToRL, or the `whole` text,
            tracebacks included.
        max_output_chars: most characters of an output; a longer one keeps one half of them from its head and one from
            its tail, with `...` between. Null keeps all.
        empty_output: output of a program that printed nothing.
        no_code_output: output if no complete python block precedes the output block.
        template: `torl` inserts the question into a plain prompt; `chat` uses the model's chat template.
        plain_prompt: the plain prompt, with `[PROMPT]` in place of the question.
        system_prompt: inserted first in conversations that have no system message; for the template `chat` only.
        tool: name of the tool that runs programs; its only argument is `code`.
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
        if value.count(QUESTION_PLACEHOLDER) != 1:
            raise ValueError(f"'plain_prompt' must contain {QUESTION_PLACEHOLDER} exactly once")


@frozen(kw_only=True)
class TorlMathConfig:
    r"""
    Penalty and limits of the reward, which is 1 if the last `\boxed{}` equals the ground truth, and -1 otherwise.

    Attributes:
        error_penalty: added if the model wrote code and no call of the episode ran without error; -0.5 in ToRL's
            ablation, 0 in its main runs.
        timeout_s: longest comparison in seconds; an answer that takes longer is wrong.
        processes: processes that compare answers concurrently.
    """

    error_penalty: float = field(default=0.0, validator=validators.le(0))
    timeout_s: float = field(default=5.0, validator=validators.gt(0))
    processes: int = field(default=2, validator=validators.ge(1))
