"""The configuration of the log. Every module may call `structlog.get_logger()`; this one decides where lines go."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from contextlib import suppress
from types import NoneType
from typing import Final, NoReturn, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, Processor

from turnwise.events.json_stream import open_json_stream
from turnwise.options import LogFormat
from turnwise.terminal import literal, one_line

LINE_LOCK: Final = threading.RLock()
"""Held while a line is written, so that lines of threads do not mix; reentrant, because signal handlers may log."""


def configure_logging(
    level: str = "info", log_format: LogFormat = "auto", stream: TextIO | None = None, *, whole_stream: bool = False
) -> None:
    """
    Send every log line of this process to one stream.

    Args:
        level: debug, info, warning or error.
        log_format: `console` for people, `json` for one JSON object per line, `auto` for console on a terminal.
        stream: standard error when None.
        whole_stream: with `json`, each line of standard error becomes an object, whoever writes it; for a command, to
            which the process belongs.
    """
    if whole_stream and log_format == "json" and stream is None:
        open_json_stream()

    def write(*event: object) -> NoReturn:
        out = stream or sys.stderr  # looked up for each line: notebooks and tests replace standard error
        with LINE_LOCK, suppress(OSError):  # the reader of the log may end before the run
            out.write(f"{event[2]}\n")
            out.flush()
        raise structlog.DropEvent  # its logger prints to standard output if that was replaced during its import

    console = log_format == "console" or (log_format == "auto" and (stream or sys.stderr).isatty())
    renderers: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if console:
        renderers = [_escape_values, structlog.dev.ConsoleRenderer(exception_formatter=_write_traceback)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
            write,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        cache_logger_on_first_use=False,  # a cached one cannot be pickled, and outlives another configuration
    )


def _escape_values(_logger: object, _name: str, event: EventDict) -> EventDict:
    """Show control characters in the texts of a line as escapes, before the renderer adds colours."""
    kept = (bool, int, float, NoneType)
    return {
        one_line(name): value
        if name == "exc_info" or isinstance(value, kept)
        else one_line(value if isinstance(value, str) else repr(value))
        for name, value in event.items()
    }


def _write_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    stream.write(literal("".join(traceback.format_exception(*exc_info))))
