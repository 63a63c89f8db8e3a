"""Formats the output of a program for the model."""

from __future__ import annotations

from turnwise import ToolResult
from turnwise_torl_python.config import TorlPythonConfig


def format_observation(result: ToolResult, config: TorlPythonConfig) -> str:
    """
    Return the text between the opening of the output block and its closing fence.

    Args:
        result: result of the tool.
        config: format of errors, limit of the length, and text of an empty output.
    """
    text = result.text.rstrip()
    if not text:
        return config.empty_output
    if result.error and config.errors == "last_line":
        text = text.rpartition("\n")[2]
    return shorten(text, config.max_output_chars)


def shorten(text: str, max_chars: int | None) -> str:
    """Reduce a text to `max_chars` characters, half from its head and half from its tail, with `...` between."""
    if max_chars is None or len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}...{text[-half:]}"
