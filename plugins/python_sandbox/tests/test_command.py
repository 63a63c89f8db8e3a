"""The command `turnwise sandbox`: its output, its exit codes, its errors."""

from __future__ import annotations

import argparse
import io
import json

import pytest

from turnwise import NoConfig
from turnwise.errors import ConfigError, DataError
from turnwise.protocols import Command, Resources
from turnwise_python_sandbox import SandboxUnavailableError
from turnwise_python_sandbox.command import SandboxCommand


def run_command(*words: str) -> int:
    """Parse the words and run the command, as the command line does."""
    command = SandboxCommand(NoConfig(), Resources())
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_it_is_a_command() -> None:
    """`SandboxCommand` implements the protocol `Command`."""
    assert isinstance(SandboxCommand(NoConfig(), Resources()), Command)


def test_a_file_is_run(tmp_path, capsys) -> None:
    """`run` prints the program's output and errors on the matching streams, and returns 0."""
    file = tmp_path / "a.py"
    file.write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)")

    assert 0 == run_command("run", str(file))
    assert ("out\n", "err\n") == capsys.readouterr()


def test_a_file_is_run_as_json(tmp_path, capsys) -> None:
    """`run --json` prints the whole result as one line of JSON."""
    file = tmp_path / "a.py"
    file.write_text("print(1)\n1 / 0")

    assert 1 == run_command("run", str(file), "--json", "--timeout-s", "3")
    found = json.loads(capsys.readouterr().out)
    assert ("error", "1\n", 1) == (found["status"], found["stdout"], found["exit_code"])
    assert {"stderr", "wall_s", "tier", "tier_name", "isolated"} <= found.keys()


def test_standard_input_is_a_file(monkeypatch, capsys) -> None:
    """`run -` reads the program from standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("print(7)"))

    assert 0 == run_command("run", "-")
    assert "7\n" == capsys.readouterr().out


def test_a_failure_is_reported(tmp_path, capsys) -> None:
    """A status other than `ok` is printed on standard error, and the exit code is 1."""
    file = tmp_path / "a.py"
    file.write_text("while True: pass")

    assert 1 == run_command("run", str(file), "--timeout-s", "0.3")
    assert "timeout" in capsys.readouterr().err


def test_a_missing_file_is_an_error() -> None:
    """A file that cannot be read is a `DataError` that names it."""
    with pytest.raises(DataError, match="cannot read"):
        run_command("run", "/no/such/file.py")


def test_a_run_without_isolation_says_so(tmp_path, capsys) -> None:
    """`--unsafe-subprocess` runs without isolation, and the result says so."""
    file = tmp_path / "a.py"
    file.write_text("print(1)")

    assert 0 == run_command("run", str(file), "--json", "--tier", "5", "--unsafe-subprocess")
    found = json.loads(capsys.readouterr().out)
    assert ("unsafe_subprocess", False) == (found["tier_name"], found["isolated"])


def test_a_file_that_is_no_text_is_an_error(tmp_path) -> None:
    """A file that is not UTF-8 is a `DataError` of one line with its path."""
    (tmp_path / "a.py").write_bytes(b"print('\xff')")

    with pytest.raises(DataError, match=r"^cannot read .*a\.py: 'utf-8' codec .*$"):
        run_command("run", str(tmp_path / "a.py"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "the following arguments are required: file"),
        ([], "the following arguments are required: ACTION"),
        (["run", "a.py", "--tier", "best"], "argument --tier: invalid int value: 'best'"),
        (["run", "a.py", "--timeout-s", "soon"], "argument --timeout-s: invalid float value: 'soon'"),
        (["fly"], "argument ACTION: invalid choice: 'fly'"),
        (["run", "a.py", "--preload", "numpy"], "unrecognized arguments: --preload numpy"),
    ],
)
def test_wrong_words_are_explained(capsys, words: list[str], message: str) -> None:
    """A wrong command line ends with exit code 2 and a last line that says what is wrong."""
    with pytest.raises(SystemExit) as caught:
        run_command(*words)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--timeout-s", "0"], "'timeout_s' must be > 0: 0.0"),
        (["--memory-mb", "1"], "'memory_mb' must be >= 16: 1"),
        (["--max-output-bytes", "-5"], "'max_output_bytes' must be >= 0: -5"),
        (["--tier", "4"], "'tier' must be one of 0, 1, 2, 3, 5: 4"),
    ],
)
def test_a_limit_out_of_range_is_refused(options: list[str], message: str) -> None:
    """The error names the option and has the value, before the file is read."""
    with pytest.raises(ConfigError, match=message):
        run_command("run", "/no/such/file.py", *options)


@pytest.mark.parametrize(
    ("tier", "reason"),
    [("3", r"tier 3 \(seatbelt\) does not exist"), ("5", "needs unsafe_subprocess"), ("0", r"tier 0 \(remote\)")],
)
def test_a_tier_that_does_not_work_is_an_error(tmp_path, tier: str, reason: str) -> None:
    """The error is one line with the reason and both hints, and the program does not run."""
    (tmp_path / "a.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(SandboxUnavailableError, match=reason) as caught:
        run_command("run", str(tmp_path / "a.py"), "--tier", tier)

    assert "\n" not in str(caught.value)
    assert "set remote_url" in str(caught.value)
    assert "unsafe_subprocess: true" in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_options_reach_the_program(tmp_path, capsys) -> None:
    """The memory limit and the output limit of the command line apply."""
    (tmp_path / "big.py").write_text("x = bytearray(100 * 2**20)")
    (tmp_path / "loud.py").write_text("print('x' * 1000)")

    assert 1 == run_command("run", str(tmp_path / "big.py"), "--json", "--memory-mb", "32")
    assert 1 == run_command("run", str(tmp_path / "loud.py"), "--json", "--max-output-bytes", "100")
    big, loud = map(json.loads, capsys.readouterr().out.splitlines())
    assert ("memory", "output_limit", 100) == (big["status"], loud["status"], len(loud["stdout"]))


def test_output_that_is_no_text_is_printed(tmp_path, capsys) -> None:
    """Bytes that are not UTF-8 are replaced instead of breaking the command."""
    (tmp_path / "a.py").write_text("import os\nos.write(1, b'a\\xffb')")

    assert 0 == run_command("run", str(tmp_path / "a.py"))
    assert "a\ufffdb" == capsys.readouterr().out
