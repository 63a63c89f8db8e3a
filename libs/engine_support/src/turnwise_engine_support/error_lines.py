"""One-line error texts for whatever a foreign package raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from turnwise.errors import ConfigError, EngineError, TurnwiseError


def error_line(error: BaseException) -> str:
    """Return the type of an error and the line of its text that names the cause."""
    if callable(details := getattr(error, "errors", None)):
        # The text of a pydantic error starts with the number of errors, which explains nothing.
        return f"{type(error).__name__}: {details()[0]['msg'].splitlines()[0]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A line that ends with a colon announces the next one.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def engine_errors(prefix: str, kind: type[TurnwiseError] = EngineError) -> Iterator[None]:
    """
    Raise any exception of the block but a `ConfigError` or `EngineError` as one line that starts with the prefix.

    Args:
        prefix: of the text.
        kind: of the error; `ConfigError` if another attempt would meet it again.
    """
    try:
        yield
    except (ConfigError, EngineError):
        raise
    except Exception as error:
        raise kind(f"{prefix}: {error_line(error)}") from error
