"""Progress bars of libraries, which belong on a terminal and in no log."""

from __future__ import annotations

import sys


def hide_progress_bars() -> None:
    """Hide the bars of transformers where standard error is no terminal: they would break the lines of a log."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
