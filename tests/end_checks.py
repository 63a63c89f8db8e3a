"""The promises that hold in every cell of the matrix of ends."""

from __future__ import annotations

import signal

from end_runs import NUM_SESSIONS, Ended, Outcome

FULL_SIZE = {"rollout": 10, "eval": 10, "train": 3, "sft": 1, "serve": NUM_SESSIONS}
"""Episodes, steps, models or sessions of a complete run."""
INTERRUPTS = ("SIGINT", "SIGINT twice", "SIGTERM", "SIGHUP")


def find_problems(outcome: Outcome) -> list[str]:
    """Return what a cell does against the promises; empty if it keeps all of them."""
    cell, first = outcome.cell, outcome.first
    problems = [] if outcome.reached else ["the command did not come to the moment"]
    problems += _problems_of_the_end(outcome)
    problems += [f"the end: {each}" for each in _plain(first, is_killed=cell.fault == "SIGKILL")]
    if cell.fault != "SIGKILL":
        # The episodes of a full disk stay in the partial file.
        kept = {"trajectories.parquet.partial"} if cell.fault == "full disk" else set()
        problems += [f"left after the end: {name}" for name in (*first.files, *first.held.left) if name not in kept]
    last = outcome.resumed[-1]
    for each in outcome.resumed:
        problems += [f"--resume: {text}" for text in _plain(each, is_killed=False)]
    if last.code != 0 or not last.held.is_complete:
        problems.append(f"--resume: exit code {last.code}, {'complete' if last.held.is_complete else 'not complete'}")
    if len(last.held.parts) < FULL_SIZE[cell.command]:
        problems.append(f"--resume: only {sorted(last.held.parts)}")
    problems += [f"left after --resume: {name}" for name in last.held.left]
    problems += [f"twice: {name}" for name in last.held.doubled]
    changed = [name for name, part in first.held.parts.items() if last.held.parts.get(name) != part]
    return problems + [f"lost: {name}" for name in changed]


def _problems_of_the_end(outcome: Outcome) -> list[str]:
    """Return what is wrong with the exit code: 0 says that the run is complete, and nothing else does."""
    cell, first = outcome.cell, outcome.first
    code, is_complete = first.code, first.held.is_complete
    if code is None:
        return ["the command hung"]
    if cell.fault == "SIGKILL":
        return [] if code == -signal.SIGKILL else [f"exit code {code} after SIGKILL"]
    if cell.command == "serve" and cell.fault in INTERRUPTS:
        expected = (130,) if cell.moment == "starting" else (0, 130) if cell.fault == "SIGINT twice" else (0,)
        return [] if code in expected else [f"exit code {code}"]
    if 2 * first.held.num_failed > FULL_SIZE[cell.command]:
        return [] if code == 1 else [f"exit code {code} of a run that failed"]
    if is_complete:
        return [] if code == 0 else [f"exit code {code} of a complete run"]
    if code == 0:
        return ["exit code 0 of a run that is not complete"]
    if cell.fault in INTERRUPTS:
        return [] if code == 130 else [f"exit code {code} after {cell.fault}"]
    return [] if code in (1, 2) else [f"exit code {code}"]


def _plain(end: Ended, *, is_killed: bool) -> list[str]:
    """Return what a user should not see."""
    problems = ["a traceback"] if "Traceback (most recent call last)" in end.error else []
    if end.code not in (0, None) and not is_killed and not end.last_line.startswith("turnwise: "):
        problems.append(f"the last line is {end.last_line[:100]!r}")
    return problems + [f"left a process: {line}" for line in end.processes]
