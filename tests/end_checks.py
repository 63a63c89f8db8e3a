"""The promises that hold in every cell of the matrix of ends."""

from __future__ import annotations

import signal

from end_cells import Cell
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
        # The episodes stay in the partial file where the disk is full, or a second signal stops a gateway that writes.
        is_kept = cell.fault == "full disk" or (cell.command == "serve" and first.code == 130)
        kept = {"trajectories.parquet.partial"} if is_kept else set()
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
    if cell.command == "serve":
        return [] if code in _codes_of_serve(cell) else [f"exit code {code}"]
    if 2 * first.held.num_failed > FULL_SIZE[cell.command]:
        return [] if code == 1 else [f"exit code {code} of a run that failed"]
    if is_complete:
        return [] if code == 0 else [f"exit code {code} of a complete run"]
    if code == 0:
        return ["exit code 0 of a run that is not complete"]
    if cell.fault in INTERRUPTS:
        return [] if code == 130 else [f"exit code {code} after {cell.fault}"]
    return [] if code in (1, 2) else [f"exit code {code}"]


def _codes_of_serve(cell: Cell) -> tuple[int, ...]:
    """Return the exit codes of a gateway, which a signal ends: 0 after the first one, and 130 after a second one."""
    if cell.fault == "none":
        return (0,)
    if cell.fault not in INTERRUPTS:
        return (0, 2) if cell.moment == "closing" else (2,)
    if cell.moment == "starting":
        return (130,)
    # The gateway writes and closes because of a signal, so that of the cell is the second one.
    is_second = cell.moment in ("writing", "closing") or cell.fault == "SIGINT twice"
    return (0, 130) if is_second else (0,)


def _plain(end: Ended, *, is_killed: bool) -> list[str]:
    """Return what a user should not see."""
    problems = ["a traceback"] if "Traceback (most recent call last)" in end.error else []
    if end.code not in (0, None) and not is_killed and not end.last_line.startswith("turnwise: "):
        problems.append(f"the last line is {end.last_line[:100]!r}")
    return problems + [f"left a process: {line}" for line in end.processes]
