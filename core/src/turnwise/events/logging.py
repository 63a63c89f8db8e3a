"""
The configuration of the log.

Every module may call ``structlog.get_logger()``; only `configure_logging` decides where lines go.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

from turnwise.options import LogFormat


def configure_logging(level: str = "info", log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """
    Send every log line of this process to one stream.

    Args:
        level: debug, info, warning or error.
        log_format: `console` for people, `json` for one JSON object per line, `auto` for console on a terminal.
        stream: standard error when None.
    """

    def make_logger(*_arguments: object) -> structlog.PrintLogger:
        # Looked up for each logger: notebooks and tests replace standard error.
        return structlog.PrintLogger(sys.stderr if stream is None else stream)

    console = log_format == "console" or (log_format == "auto" and (stream or sys.stderr).isatty())
    renderer: Processor = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if console else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=make_logger,
        # A cached logger cannot be pickled after its first line, and would outlive a change of stream.
        cache_logger_on_first_use=False,
    )
