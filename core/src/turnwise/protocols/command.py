"""The contracts of subcommands and diagnoses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, Protocol, get_args, runtime_checkable

from attrs import field, frozen, validators

if TYPE_CHECKING:
    import argparse

OK: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
"""Exit code after SIGINT, as shells have it."""


@runtime_checkable
class Command(Protocol):
    """A subcommand of `turnwise`."""

    help: str
    """One line for ``turnwise --help``."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare options, with examples in the epilog."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return the exit code: `OK`, `BAD_INPUT`, `INTERRUPTED` or `FAILED`."""


FindingState = Literal["ok", "missing", "limited", "broken"]


@frozen
class Finding:
    """
    One line of a diagnosis.

    Attributes:
        item: the subject, such as `GPU` or `shared memory`.
        state: `ok`; `missing` if a part cannot run without it; `limited` if the part runs with less; `broken` if it is
            present and does not work.
        explanation: one line: the observation and its effect.
        hint: one line: the command or option that changes it; empty if there is nothing to do.
    """

    item: str
    state: FindingState = field(validator=validators.in_(get_args(FindingState)))
    explanation: str
    hint: str = ""


@runtime_checkable
class Diagnostic(Protocol):
    """Checks the requirements of a plugin on this machine."""

    def diagnose(self) -> Iterable[Finding]:
        """Return one finding for each thing checked; an exception is reported as one line."""
