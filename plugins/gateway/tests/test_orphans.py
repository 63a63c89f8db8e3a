"""Processes with a mark are found whenever they have started."""

import sys

from turnwise_gateway.programs import orphans


def test_the_environment_of_a_process_that_starts_is_read(tmp_path, monkeypatch):
    """It was still empty for one process in seven when the call that started it had returned."""
    environment = tmp_path / "environ"
    environment.touch()
    (tmp_path / "exe").symlink_to(sys.executable)
    monkeypatch.setattr(orphans.time, "sleep", lambda _seconds: environment.write_bytes(b"A=1"))

    assert orphans._environment_of(str(tmp_path)) == b"A=1"
