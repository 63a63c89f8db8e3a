"""`turnwise sandbox`."""

from __future__ import annotations

import argparse
import io
import json

import pytest

from turnwise.errors import DataError
from turnwise.protocols import Command, Resources
from turnwise.registry import NoConfig
from turnwise_python_sandbox.command import SandboxCommand


def turnwise_sandbox(*words: str) -> int:
    """Run the command as the command line does."""
    command = SandboxCommand(NoConfig(), Resources())
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_it_is_a_command() -> None:
    """It fulfils the protocol."""
    assert isinstance(SandboxCommand(NoConfig(), Resources()), Command)


def test_a_file_is_run(tmp_path, capsys) -> None:
    """Its streams are ours, and the exit code says whether it went well."""
    file = tmp_path / "a.py"
    file.write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)")

    assert 0 == turnwise_sandbox("run", str(file))
    assert ("out\n", "err\n") == capsys.readouterr()


def test_a_file_is_run_as_json(tmp_path, capsys) -> None:
    """The whole result as one line of JSON."""
    file = tmp_path / "a.py"
    file.write_text("print(1)\n1 / 0")

    assert 1 == turnwise_sandbox("run", str(file), "--json", "--timeout-s", "3")
    found = json.loads(capsys.readouterr().out)
    assert ("error", "1\n", 1) == (found["status"], found["stdout"], found["exit_code"])
    assert {"stderr", "wall_s", "tier", "tier_name", "isolated"} <= found.keys()


def test_standard_input_is_a_file(monkeypatch, capsys) -> None:
    """`-` as everywhere."""
    monkeypatch.setattr("sys.stdin", io.StringIO("print(7)"))

    assert 0 == turnwise_sandbox("run", "-")
    assert "7\n" == capsys.readouterr().out


def test_a_failure_is_told(tmp_path, capsys) -> None:
    """The verdict is on standard error."""
    file = tmp_path / "a.py"
    file.write_text("while True: pass")

    assert 1 == turnwise_sandbox("run", str(file), "--timeout-s", "0.3")
    assert "timeout" in capsys.readouterr().err


def test_a_file_that_is_not_there() -> None:
    """Bad input, in one line."""
    with pytest.raises(DataError, match="cannot read"):
        turnwise_sandbox("run", "/no/such/file.py")


def test_without_isolation_it_says_so(tmp_path, capsys) -> None:
    """The unsafe way is asked for by name, and the result names it."""
    file = tmp_path / "a.py"
    file.write_text("print(1)")

    assert 0 == turnwise_sandbox("run", str(file), "--json", "--tier", "5", "--unsafe-subprocess")
    found = json.loads(capsys.readouterr().out)
    assert ("unsafe_subprocess", False) == (found["tier_name"], found["isolated"])


def test_doctor(capsys) -> None:
    """Every tier with what it promises, and the one that would be used."""
    code = turnwise_sandbox("doctor", "--json")
    found = json.loads(capsys.readouterr().out)

    assert [1, 2] == [row["tier"] for row in found["tiers"]]
    assert all(row["promise"] and (row["works"] or row["reason"]) for row in found["tiers"])
    assert (found["default_tier"] is None) == bool(code)


def test_doctor_for_people(capsys) -> None:
    """The same in lines."""
    turnwise_sandbox("doctor")

    assert "promises:" in capsys.readouterr().out
