"""
A process that compares answers, run as ``python -m turnwise_torl_python.verifier_process TIMEOUT_S``.

It writes a line when it is ready. It then reads lines with a JSON list of ground truth and answer, and writes `true` or
`false` for each. Answers are parsed as LaTeX only, because math-verify's parser for plain expressions evaluates them.
A timer ends the process when a comparison takes too long, and an exit code tells that one took too much memory. Nothing
handles the timer's signal, so no loop of a library outlives it, and this process does not outlive its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from typing import Any, Final

from turnwise.descriptors import reserve_stdout

OUT_OF_MEMORY: Final = 77
"""Exit code after a `MemoryError`, which may have left a library in any state."""
_MEMORY_BYTES: Final = 2 << 30


def equals(truth: str, answer: str) -> bool:
    """Return whether math-verify finds two LaTeX texts equal; False if it cannot parse one."""
    from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]  # it has no types

    def read(text: str) -> list[Any]:
        found: list[Any] = parse(
            f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None
        )
        return found

    return bool(verify(read(truth), read(answer), timeout_seconds=None))


def main() -> None:
    """Compare the pairs on standard input until it ends."""
    _limit_memory()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a parent that ignores the signal passes that on
    logging.disable(logging.CRITICAL)
    timeout_s = float(sys.argv[1])
    verdicts = reserve_stdout()
    equals("\\frac{1}{2}", "0.5")  # lazy imports must not count for the first comparison
    print("ready", file=verdicts, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        truth, answer = json.loads(line)
        print(json.dumps(_equals_or_false(truth, answer)), file=verdicts, flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _equals_or_false(truth: str, answer: str) -> bool:
    try:
        return equals(truth, answer)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception:  # noqa: BLE001 - parsers raise anything on a model's text, and such an answer is wrong
        return False


def _limit_memory() -> None:
    import resource

    with contextlib.suppress(OSError, ValueError):  # a lower limit is set already, or the system has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


if __name__ == "__main__":
    main()
