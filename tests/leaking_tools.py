"""A tool that hangs in a process, with a child, and leaves files named after their process ids."""

import os
import signal
from pathlib import Path


def calculator(expression: str) -> str:
    """
    Compute an expression, in theory.

    Args:
        expression: arithmetic.
    """
    os.fork()
    Path(os.environ["TURNWISE_TEST_PIDS"], str(os.getpid())).touch()
    signal.pause()
    return expression
