"""Exit codes of the commands."""

from __future__ import annotations

from typing import Final

from turnwise.errors import ConfigError, DataError, PluginError, TemplateError, TurnwiseError

OK: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
"""As shells say it of a program that SIGINT ended."""


def exit_code_of(error: TurnwiseError) -> int:
    """Return 2 for an error that the user can fix in a file or on the command line, 1 for any other."""
    return BAD_INPUT if isinstance(error, ConfigError | DataError | PluginError | TemplateError) else FAILED
