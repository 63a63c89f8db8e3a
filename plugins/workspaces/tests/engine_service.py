"""A service of podman for tests, which can be killed and started again as a daemon of containers is."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from attrs import define, field
from images import ENGINE


@define
class Service:
    """A service of podman, which clients reach by a socket."""

    path: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def command(self) -> tuple[str, ...]:
        """The engine of workspaces."""
        return ("podman", "--remote", "--url", f"unix://{self.path}")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = subprocess.Popen([*ENGINE, "system", "service", "-t", "0", f"unix://{self.path}"])
        while subprocess.run([*self.command, "version"], capture_output=True, check=False).returncode != 0:
            assert self._process.poll() is None
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill it. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
