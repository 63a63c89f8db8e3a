"""Messages as token ids, each turn encoded once and only ever appended."""

# ruff: noqa: TID253 - for training and evaluation only; no hook imports it

from typing import Any, Final

from transformers import PreTrainedTokenizerFast

from turnwise_calculator_demo.episodes import TOOL_SCHEMA

_MARK: Final = "\x00"
"""Stands for the content while the text around it is taken from the template."""


class EpisodeEncoder:
    """
    Turns the parts of an episode into token ids.

    The chat template renders each message on its own, so the text between two assistant turns is found by rendering
    a tool message alone.

    Args:
        tokenizer: A tokenizer with this package's chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._prompts = {True: self._render("user", [TOOL_SCHEMA]), False: self._render("user", None)}
        # The engine stops at the end-of-turn token, so the newline that follows it in the template comes here.
        self._observation = "\n" + self._render("tool", None)

    def prompt(self, question: str, *, with_tools: bool = True) -> list[int]:
        """
        The ids of a question and the start of the assistant's turn.

        Args:
            question: The user message.
            with_tools: Whether the system turn lists the calculator.
        """
        return self._encode(self._prompts[with_tools].replace(_MARK, question))

    def action(self, text: str) -> list[int]:
        """The ids of an assistant turn and the token that ends it."""
        return self._encode(text + str(self._tokenizer.eos_token))

    def observation(self, response: str) -> list[int]:
        """The ids from the end of an assistant turn to the start of the next, with the tool's message between."""
        return self._encode(self._observation.replace(_MARK, response))

    def _render(self, role: str, tools: list[Any] | None) -> str:
        """The template's text around one message."""
        text = self._tokenizer.apply_chat_template(
            [{"role": role, "content": _MARK}], tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        """Plain encoding: nothing is added around the text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
