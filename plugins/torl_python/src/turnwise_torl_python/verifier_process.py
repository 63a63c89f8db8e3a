"""
The process that compares answers, run as ``python -m turnwise_torl_python.judge_process TIMEOUT_S``.

It writes a line when it is ready, then reads one JSON list a line, ground truth and answer, and writes `true` or
`false`. What the model wrote is only ever
parsed as LaTeX: math-verify's parser for plain expressions evaluates them. A comparison that takes too long is ended by
a timer whose signal nothing handles, so that no loop in any library can outlive it, nor this process its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from typing import IO, Any, Final

_MEMORY_BYTES: Final = 2 << 30


def equals(truth: str, answer: str) -> bool:
    """Return whether two LaTeX texts mean the same, as math-verify sees it; whatever cannot be read does not."""
    from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]  # it has none

    def read(text: str) -> list[Any]:
        found: list[Any] = parse(
            f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None
        )
        return found

    return bool(verify(read(truth), read(answer), timeout_seconds=None))


def main() -> None:
    """Answer lines until there are no more."""
    _limit_memory()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a parent that ignores it hands that on
    logging.disable(logging.CRITICAL)
    timeout_s = float(sys.argv[1])
    answers = _own_stdout()
    equals("\\frac{1}{2}", "0.5")  # what is loaded late must not count for the first answer
    print("ready", file=answers, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        truth, answer = json.loads(line)
        print(json.dumps(_equals_or_not(truth, answer)), file=answers, flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _own_stdout() -> IO[str]:
    """Return standard output, for answers alone: libraries that print write nowhere."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return answers


def _equals_or_not(truth: str, answer: str) -> bool:
    try:
        return equals(truth, answer)
    except Exception:  # noqa: BLE001 - what a parser raises on a model's text is an answer that is not right
        return False


def _limit_memory() -> None:
    import resource

    with contextlib.suppress(OSError, ValueError):  # a lower limit stands already, or the system knows none
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


if __name__ == "__main__":
    main()
