"""
A process with the simulated programs of the leaderboard, run as ``python -m turnwise_bfcl.simulation WHEEL CPU_S``.

It reads lines of JSON and answers with lines of JSON. It keeps nothing between two of them: each request has the first
state of the programs and all calls so far. So an episode needs no process for itself, and loses nothing with one.

The code in the wheel evaluates a call as Python, so `turnwise_bfcl.calls` decides which texts may come here.
"""

from __future__ import annotations

import importlib
import json
import resource
import signal
import sys
from types import ModuleType
from typing import Any, Final

from turnwise.descriptors import reserve_stderr, reserve_stdout
from turnwise.types import JsonDict

_PACKAGE: Final = "bfcl_eval.eval_checker.multi_turn_eval"
_MODEL: Final = "model"
_MAX_BYTES: Final = 2 * 2**30
"""Address space. The programs need a tenth of it."""
_MAX_CHARS: Final = 2**20
"""Characters of a result."""


def main() -> None:
    """Answer requests until the input ends; a timer ends the process when one takes too long."""
    answers = reserve_stdout()
    sys.path.insert(0, sys.argv[1])
    utils = importlib.import_module(f"{_PACKAGE}.multi_turn_utils")
    checker = importlib.import_module(f"{_PACKAGE}.multi_turn_checker")
    programs = importlib.import_module("bfcl_eval.constants.executable_backend_config").CLASS_FILE_PATH_MAPPING
    reserve_stderr()
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores the signal passes that on
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["entry"]["involved_classes"]:
            importlib.import_module(programs[name])  # it needs its time once
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
        try:
            answer = _answer(request, utils, checker)
        except (MemoryError, RecursionError):
            answer = {"exhausted": True}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _forget(utils)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(request: JsonDict, utils: ModuleType, checker: ModuleType) -> JsonDict:
    entry: Any = request["entry"]
    if "turns" in request:
        found = checker.multi_turn_checker(request["turns"], request["answers"], entry, "", _MODEL)
        return {"valid": found["valid"]}
    results, _ = utils.execute_multi_turn_func_call(
        request["calls"],
        entry["initial_config"],
        entry["involved_classes"],
        _MODEL,
        entry["id"],
        long_context="long_context" in entry["id"],
    )
    return {"text": results[-1][:_MAX_CHARS]}


def _forget(utils: ModuleType) -> None:
    """Remove the programs of a request, which the package keeps as globals of a module."""
    for name in [each for each in vars(utils) if each.endswith("_instance")]:
        delattr(utils, name)


if __name__ == "__main__":
    main()
