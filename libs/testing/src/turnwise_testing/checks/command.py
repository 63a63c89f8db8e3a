"""
Requirements of every command, as plain functions without pytest.

A check takes a `CommandProbe` and raises `AssertionError` with a text that describes the failure.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from attrs import frozen

from turnwise.errors import TurnwiseError
from turnwise.protocols import Command
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.probes.engine import expect, expect_equal


@frozen(kw_only=True)
class CommandExample:
    """
    A command line.

    Attributes:
        arguments: after the command's name.
        exit_code: that `run` returns.
        output: text that the standard output contains.
    """

    arguments: Sequence[str] = ()
    exit_code: int = 0
    output: str = ""


@frozen(kw_only=True)
class CommandProbe:
    """
    The probe of a command.

    Attributes:
        make_command: builds it, as the registered factory does.
        name: of the command.
        examples: command lines that it runs, in an empty folder.
    """

    make_command: Callable[[], Command]
    name: str = "command"
    examples: tuple[CommandExample, ...] = ()

    def parser(self, command: Command) -> argparse.ArgumentParser:
        """Return the parser with the command's options."""
        parser = argparse.ArgumentParser(prog=f"turnwise {self.name}")
        command.add_arguments(parser)
        return parser


COMMAND_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
COMMANDS = PartChecks(
    checks=COMMAND_CHECKS,
    probe=lambda part: CommandProbe(make_command=part.make, name=part.name, examples=part.examples),
    examples="CommandExamples",
)
_check = register(COMMAND_CHECKS)


@_check
def check_fulfils_the_protocol(probe: CommandProbe) -> None:
    """The factory returns an object with `help`, `add_arguments` and `run`."""
    command = probe.make_command()
    missing = [name for name in ("help", "add_arguments", "run") if not hasattr(command, name)]
    expect(not missing, f"{type(command).__name__} has no {', '.join(missing)}")


@_check
def check_help_is_one_line(probe: CommandProbe) -> None:
    """`help` is one line, in lower case and without a full stop, as `turnwise --help` prints it."""
    text = probe.make_command().help
    expect(bool(text.strip()) and "\n" not in text, f"help is {text!r}, expected one line")
    expect(not text.endswith("."), f"help {text!r} ends with a full stop")
    expect(text[0].islower() or text[:2].isupper(), f"help {text!r} starts with a capital letter")


@_check
def check_options_are_documented(probe: CommandProbe) -> None:
    """`turnwise COMMAND --help` explains every option, and has examples at its end."""
    parser = probe.parser(probe.make_command())
    silent = [action.dest for action in parser._actions if not action.help]  # noqa: SLF001 - argparse has no other list
    expect_equal(silent, [], "the options without a help text")
    expect("turnwise" in (parser.epilog or ""), "the parser's epilog has no example, such as `turnwise my_command`")
    parser.format_help()


@_check
def check_declares_its_options_twice(probe: CommandProbe) -> None:
    """Options can be declared on several parsers: tests and documentation make their own."""
    command = probe.make_command()
    first, second = (probe.parser(command).format_help() for _ in range(2))
    expect_equal(second, first, "the help of a second parser")


@_check
def check_examples_have_their_results(probe: CommandProbe) -> str | None:
    """`run` prints the expected text and returns the expected exit code; errors of users are `TurnwiseError`s."""
    for example in probe.examples:
        command, output = probe.make_command(), io.StringIO()
        line = " ".join(["turnwise", probe.name, *example.arguments])
        with _empty_folder(), redirect_stdout(output), redirect_stderr(io.StringIO()):
            try:
                code: object = command.run(probe.parser(command).parse_args(list(example.arguments)))
            except TurnwiseError as error:
                code = 2
                output.write(str(error))
        expect(type(code) is int, f"{line}: run returned {code!r}, expected an exit code")
        expect_equal(code, example.exit_code, f"exit code of {line!r}")
        expect(example.output in output.getvalue(), f"{line}: {example.output!r} is not in {output.getvalue()!r}")
    return None if probe.examples else "no command lines are known: a CommandSuite has them in its fixture `examples`"


@contextmanager
def _empty_folder() -> Iterator[None]:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
