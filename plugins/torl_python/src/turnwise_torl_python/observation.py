"""What the model reads of a program that was run."""

from __future__ import annotations

from turnwise import ToolResult
from turnwise_torl_python.config import TorlPythonConfig


def observation(result: ToolResult, config: TorlPythonConfig) -> str:
    """
    Return the text between the opened output block and its closing fence.

    Args:
        result: what the tool said.
        config: where errors go, how much is kept and what stands for nothing.
    """
    text = result.text.rstrip()
    if not text:
        return config.empty_output
    if result.error and config.errors == "last_line":
        text = text.rpartition("\n")[2]
    return shortened(text, config.max_output_chars)


def shortened(text: str, max_chars: int | None) -> str:
    """Return the head and the tail of a text of more than `max_chars` characters, half each, with `...` between."""
    if max_chars is None or len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}...{text[-half:]}"
