"""The kills of `random_kills.py`: a role, a moment of the run that an event marks, and the delivery of a SIGKILL."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
from attrs import define, field, frozen

from turnwise.types import Status
from turnwise_result_files import read_results

ROLES: Final = {
    "worker": "WorkerActor",
    "replica": "ReplicaActor",
    "reward worker": "RewardActor",
    "gcs": "gcs_server",
}
"""Part of the title of every role's processes, also while their constructor runs; the driver is the command itself."""
START_ROLES: Final = ("gcs", "replica", "reward worker", "worker")
"""The roles in the order in which their first processes start."""
START_FILES: Final = ("config.resolved.yaml", "running.json")
"""The files that appear before the first episode; a resume finds the first one."""
PHASES: Final = ("start-up", "episodes", "end")
"""Before the first score of a part, between the first and the last score, and after the last one."""
END_FILES: Final = (
    "trajectories.parquet.complete",
    "trajectories.parquet",
    "batch.safetensors.partial",
    "batch.safetensors",
    "metrics.json",
)
"""The files that appear after the last episode, in this order."""
PHASE_WEIGHTS: Final = {"driver": (1, 1, 1), "gcs": (1, 2, 1)}
"""How often a role is killed in each phase, compared with the others."""
ACTOR_WEIGHTS: Final = (1, 4, 1)
"""The same for all other roles, which have work only while episodes run."""
FINISHED: Final = (Status.COMPLETED, Status.TRUNCATED)
_MAX_DELAY_S: Final = {"start-up": 0.5, "episodes": 0.1, "end": 0.02}


@define(eq=False)
class Part:
    """
    A part of a run: one process of `turnwise rollout`, which a kill ends, and its visible progress.

    Attributes:
        runtime: `local` or `ray`.
        process: of the command.
        out: folder of the run.
        scored: file to which the reward writes the uid of every episode that it scores in this part.
        num_episodes: of the whole run.
        is_resume: an earlier part was killed.
        num_before: finished episodes that the folder held when the part started.
        was_complete: the folder held the last file, so nothing was left to do.
        seen: processes that the driver had started when it or another one was killed.
    """

    runtime: str
    process: subprocess.Popen[bytes]
    out: Path
    scored: Path
    num_episodes: int
    is_resume: bool
    num_before: int
    was_complete: bool
    seen: set[psutil.Process] = field(factory=set)
    _before: dict[str, tuple[int, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._before = {name: self._state(name) for name in (*START_FILES, *END_FILES)}

    def num_finished(self) -> int:
        """Return the number of episodes that earlier parts finished or this part scored."""
        try:
            scored = self.scored.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            scored = []
        return self.num_before + len(set(scored))

    def phase(self) -> str:
        """Return the phase of the run."""
        num_finished = self.num_finished()
        if num_finished >= self.num_episodes:
            return "end"
        return "episodes" if num_finished > self.num_before else "start-up"

    def wrote(self, name: str) -> bool:
        """Return whether this part has written a file of the folder."""
        return self._state(name) not in (self._before[name], (0, 0))

    def note_processes(self) -> None:
        """Remember all processes that the driver started."""
        with suppress(psutil.NoSuchProcess):
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))

    def _state(self, name: str) -> tuple[int, int]:
        try:
            stat = (self.out / name).stat()
        except OSError:
            return 0, 0
        return stat.st_ino, stat.st_mtime_ns


@frozen
class Kill:
    """
    A planned kill.

    Attributes:
        role: of the process to kill.
        phase: of the run, one of `PHASES`.
        share: a number from 0 to 1 that chooses the event within the phase, and the delay behind it.
    """

    role: str
    phase: str
    share: float

    def __str__(self) -> str:
        return f"{self.role} ({self.phase})"

    @classmethod
    def plan(cls, roles: Sequence[str], chance: random.Random) -> list[Kill]:
        """Return one to four kills; those of the end phase come last, and the driver's behind the others'."""
        victims = chance.choices(roles, k=chance.randint(1, 4))
        weights = [PHASE_WEIGHTS.get(role, ACTOR_WEIGHTS) for role in victims]
        phases = [chance.choices(PHASES, weight)[0] for weight in weights]
        kills = [cls(role, phase, chance.random()) for role, phase in zip(victims, phases, strict=True)]
        # A driver that is killed in the end leaves nothing to run, so there would be no worker for a later kill.
        return sorted(kills, key=lambda kill: kill.phase == "end" and 1 + (kill.role in ("driver", "gcs")))

    def is_due(self, part: Part) -> bool:
        """Return whether the event has happened; a later event counts too, because the run may pass one unseen."""
        if part.was_complete:
            return True
        if self.phase == "start-up":
            return self._has_started(part)
        if self.phase == "episodes":
            left = part.num_episodes - part.num_before
            return not left or part.num_finished() >= part.num_before + max(1, int(self.share * left))
        if part.num_finished() < part.num_episodes:
            return False
        # The actors end with the last files, so only the driver can be killed there.
        first = int(self.share * (len(END_FILES) + 1 if self.role == "driver" else 3))
        return not first or any(part.wrote(name) for name in END_FILES[first - 1 :])

    def _has_started(self, part: Part) -> bool:
        """Another role is killed as soon as it has a process; the driver at one of the events of its start."""
        if self.role != "driver" or part.phase() != "start-up":
            return True
        events = ["the command", *START_FILES[part.is_resume :]]
        if part.runtime == "ray":
            events[-1:-1] = START_ROLES
        event = events[int(self.share * len(events))]
        if event in START_ROLES:
            return bool(find_processes(part.process.pid, event))
        return event not in START_FILES or part.wrote(event)

    def delay_s(self, part: Part) -> float:
        """Return the seconds between the event and the kill: at most a second, so that the phase stays the same."""
        scale = self.share * 1009 % 1  # the digits behind the ones for the event
        return scale * (1.0 if part.was_complete else _MAX_DELAY_S[self.phase])

    def deliver(self, part: Part, chance: random.Random, deadline: float) -> Delivered | None:
        """Wait for the event and kill a process of the role; None if the part ends before, or the deadline."""
        while part.process.poll() is None and time.monotonic() < deadline:
            if not self.is_due(part) or not find_processes(part.process.pid, self.role):
                _wait(part.process, 0.1 if part.phase() == "start-up" else 0.002)
                continue
            _wait(part.process, self.delay_s(part))
            phase = part.phase()
            if self._kill_one(part, chance):
                return Delivered(self.role, phase, part.is_resume)
        return None

    def _kill_one(self, part: Part, chance: random.Random) -> bool:
        """Kill a process of the role; return whether one was alive."""
        victims = find_processes(part.process.pid, self.role)
        try:
            if victims:
                part.note_processes()
                chance.choice(victims).kill()
        except psutil.NoSuchProcess:
            return False
        return bool(victims) and (self.role != "driver" or part.process.wait() == -signal.SIGKILL)


@frozen
class Delivered:
    """
    A kill that a process received.

    Attributes:
        role: of the process.
        phase: of the part in which the run was.
        is_resume: the part was a resume.
    """

    role: str
    phase: str
    is_resume: bool

    def __str__(self) -> str:
        return f"{self.role} ({self.phase}{', resumed' if self.is_resume else ''})"


def find_processes(driver: int, role: str) -> list[psutil.Process]:
    """Return the living processes of a role: the driver itself, or its children."""
    try:
        process = psutil.Process(driver)
        found = [process] if role == "driver" else [p for p in process.children(recursive=True) if _is(p, role)]
        return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def num_finished_in(out: Path) -> int:
    """Return the number of finished episodes that a folder holds."""
    uids: set[str] = set()
    for name in ("trajectories.parquet", "trajectories.parquet.partial"):
        if (out / name).exists():
            uids |= {each.uid for each in read_results(out / name) if each.status in FINISHED}
    return len(uids)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return


def _is(process: psutil.Process, role: str) -> bool:
    try:
        return ROLES[role] in " ".join(process.cmdline())
    except psutil.Error:
        return False
