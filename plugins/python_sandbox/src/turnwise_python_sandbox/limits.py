"""Limits of one run."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from turnwise_python_sandbox.box.messages import Launch

_MIB: Final = 2**20
_UNLIMITED_S: Final = 1e6


@frozen(kw_only=True)
class Limits:
    """
    Limits of one run.

    Attributes:
        timeout_s: wall-clock seconds.
        memory_mb: MiB in addition to the warm interpreter's.
        max_output_bytes: of both streams together.
        cpu_s: processor seconds.
        disk_mb: MiB of files.
        max_files: number of files.
    """

    timeout_s: float
    memory_mb: int
    max_output_bytes: int
    cpu_s: int
    disk_mb: int
    max_files: int

    def build_launch(self, job_id: int, *, session: bool) -> Launch:
        """Return the message that starts a program with these limits."""
        # Only the supervisor knows when a session is idle, so it enforces the timeout of a session.
        wall_s = _UNLIMITED_S if session else self.timeout_s
        return Launch(job_id, wall_s, self.cpu_s, self.memory_mb * _MIB, self.disk_mb * _MIB, self.max_files, session)
