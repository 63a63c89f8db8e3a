"""Encodes the messages of an episode as token ids; each turn is encoded once and appended."""

# ruff: noqa: TID253 - only training and evaluation import it, no hook

from typing import Any, Final

from transformers import PreTrainedTokenizerFast

from turnwise_calculator_demo.episodes import TOOL_SCHEMA

_MARK: Final = "\x00"
"""Placeholder for the content when the template renders the text around it."""


class EpisodeEncoder:
    """
    Encodes the parts of an episode as token ids.

    The chat template renders each message independently of the others, so rendering a tool message alone gives the text
    between two assistant turns.

    Args:
        tokenizer: A tokenizer with this package's chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._prompts = {True: self._render("user", [TOOL_SCHEMA]), False: self._render("user", None)}
        # The engine stops at the end-of-turn token, so the observation starts with the newline that follows it in the
        # template.
        self._observation = "\n" + self._render("tool", None)

    def prompt(self, question: str, *, with_tools: bool = True) -> list[int]:
        """
        Return the ids of a question and the generation prompt.

        Args:
            question: The user message.
            with_tools: Whether the system turn lists the calculator.
        """
        return self._encode(self._prompts[with_tools].replace(_MARK, question))

    def action(self, text: str) -> list[int]:
        """Return the ids of an assistant turn with its end-of-turn token."""
        return self._encode(text + str(self._tokenizer.eos_token))

    def observation(self, response: str) -> list[int]:
        """Return the ids between two assistant turns: the tool's message and the next generation prompt."""
        return self._encode(self._observation.replace(_MARK, response))

    def _render(self, role: str, tools: list[Any] | None) -> str:
        """Return the template's text around the content of one message."""
        text = self._tokenizer.apply_chat_template(
            [{"role": role, "content": _MARK}], tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
