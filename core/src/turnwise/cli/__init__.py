"""The command line: `turnwise COMMAND`. Every command is registered through the hook `register_commands`."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from turnwise.descriptors import raise_descriptor_limit
from turnwise.errors import ConfigError, DataError, PluginError, TemplateError, TurnwiseError, describe
from turnwise.events.json_stream import close_json_stream
from turnwise.interrupts import ENDS_WITHOUT_HANDLERS, end_at_interrupts, handle_interrupts, raise_interrupt
from turnwise.plugin.host import Host, load
from turnwise.protocols import Command, Resources
from turnwise.protocols.command import BAD_INPUT, FAILED, INTERRUPTED
from turnwise.terminal import literal, write_error
from turnwise.types import PluginRecipe

_PATH_ERRORS: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG),
        *(errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
    }
)
"""Errors of the system that are about a path of the user, and no defect of a command. `ENOENT` may be one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run one command.

    Returns:
        0; 2 for bad input, after one line on standard error; 130 when it was interrupted; 1 for any other failure.
    """
    code = INTERRUPTED
    if arguments is None:  # else the process and its signals belong to a caller
        end_at_interrupts(lambda: code)
    code = _main(list(sys.argv[1:] if arguments is None else arguments))
    close_json_stream()
    if arguments is None and ENDS_WITHOUT_HANDLERS.is_set():
        sys.stdout.flush()
        os._exit(code)
    return code


def _main(words: list[str]) -> int:
    """Run one command, and print its errors."""
    # A stream is None if it was closed; the file stays open to the end.
    # Open until the process ends, so no `with` statement closes them.
    sys.stdout, sys.stderr = (each or Path(os.devnull).open("w") for each in (sys.stdout, sys.stderr))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may have less than Unicode
    raise_descriptor_limit()
    try:
        with handle_interrupts(raise_interrupt):
            return _dispatch(words)
    except TurnwiseError as error:
        write_error(f"turnwise: error: {error}\n")
        return exit_code_of(error)
    except KeyboardInterrupt:
        write_error("turnwise: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as `turnwise show | head` does
        sys.stderr.close()
        return FAILED


def _dispatch(words: list[str]) -> int:
    host = load(PluginRecipe())
    chosen = words[0] if words and not words[0].startswith("-") else ""
    if chosen:
        host.entry("commands", chosen)  # whose error has the package to install, which argparse's has not
    options = _parsed(make_parser(host, chosen), words)
    return _run(options, host.part_label("commands", chosen))


def make_parser(host: Host, chosen: str | None = None) -> argparse.ArgumentParser:
    """
    Return the parser with one subcommand per registered command.

    Args:
        host: the loaded plugins.
        chosen: the only command, so that no module of another is imported; None declares all, "" lists them.

    Raises:
        PluginError: the chosen command cannot be used; in a list it is marked as broken.
    """
    parser = _Parser(
        prog="turnwise",
        description="Run multi-turn language-model agents for reinforcement learning.",
        epilog="Examples:\n  turnwise plugins\n  turnwise rollout run.yaml --out runs/first\n\n"
        'Packages add commands. The extra of a command has its package: pip install "turnwise[rollout]"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    entries = host.registry("commands").entries()
    for name in [chosen] if chosen else entries:
        entry = entries[name]
        try:
            command: Command = entry.factory(entry.config(), Resources())
            text = str(command.help).replace("%", "%%")  # argparse would expand it
            sub = subparsers.add_parser(
                name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            sub.set_defaults(command=command, parser=sub)
            if chosen != "":
                command.add_arguments(sub)
        except Exception as error:
            if name == chosen:
                raise PluginError(f"{host.part_label('commands', name)} cannot be used: {describe(error)}") from error
            if name not in subparsers.choices:
                subparsers.add_parser(name, help=f"broken, see `turnwise {name}`")
    return parser


def _parse_path(text: str) -> Path:
    if not text:  # as from a variable of a shell that is not set; `Path` takes it for the working directory
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    return Path(text)


class _Parser(argparse.ArgumentParser):
    """A parser whose help and errors have the texts of plugins and of the command line as `literal` shows them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", Path, _parse_path)

    def format_help(self) -> str:
        return literal(super().format_help())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(status, literal(message or ""))


def _run(options: argparse.Namespace, label: str) -> int:
    """
    Run a command; an unexpected error has a traceback, and then a line that names the plugin.

    Raises:
        ConfigError: the disk is full, or the system refuses a path.
    """
    try:
        code: object = options.command.run(options)
        if not isinstance(code, int):
            raise TypeError(f"run returned {code!r}, expected an exit code")  # noqa: TRY301 - reported below
        sys.stdout.flush()
    except (TurnwiseError, BrokenPipeError):
        raise
    except Exception as error:
        if _tells_full_disk(error):
            raise ConfigError(f"{label}: {describe(error)}") from error
        if isinstance(error, OSError) and error.errno in _PATH_ERRORS and isinstance(error.filename, str | os.PathLike):
            raise ConfigError(f"{os.fspath(error.filename)}: {error.strerror}") from error
        write_error(traceback.format_exc() + f"turnwise: error: {label}: {describe(error)}\n")
        return FAILED
    return code


def _tells_full_disk(error: Exception) -> bool:
    if not isinstance(error, OSError):
        return False
    # `tempfile` says so where it can write to no folder, and has no errno for a full disk.
    has_no_temporary = error.errno == errno.ENOENT and "No usable temporary directory" in str(error)
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} or has_no_temporary


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse; values that are set behind an option count too, which argparse leaves over."""
    options, left = parser.parse_known_args(arguments)
    if left:
        if not hasattr(options, "overrides") or any(each.startswith("-") or "=" not in each for each in left):
            options.parser.error(f"unrecognized arguments: {' '.join(left)}")
        options.overrides = [*options.overrides, *left]
    return options


def exit_code_of(error: TurnwiseError) -> int:
    """Return 2 for an error that the user can fix in a file or on the command line, 1 for any other."""
    return BAD_INPUT if isinstance(error, ConfigError | DataError | PluginError | TemplateError) else FAILED
