"""`turnwise new`: writes a plugin that passes its tests."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from turnwise.protocols.command import OK
from turnwise.terminal import write_output


class NewCommand:
    """Write a project for a part of a kind, or add a part to one."""

    help = "write a plugin: a project with a typed part, its conformance test and CI"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `KIND NAME [--into FOLDER | --folder FOLDER]`."""
        from turnwise_testing.scaffold.kinds import KINDS

        parser.epilog = (
            "Examples:\n  turnwise new agent debate\n  turnwise new reward brevity --into debate\n"
            "  turnwise new engine counting --folder plugins/counting --distribution acme-counting"
        )
        parser.add_argument("kind", help=", ".join(KINDS))
        parser.add_argument("name", help="registered name of the part: lower-case words, joined by underscores")
        place = parser.add_mutually_exclusive_group()
        place.add_argument("--folder", type=Path, help="folder of the new project (default: the name)")
        place.add_argument("--into", type=Path, metavar="FOLDER", help="add the part to the plugin in this folder")
        parser.add_argument("--distribution", help="name of the new distribution (default: turnwise-NAME)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the files and print the next commands."""
        from turnwise.plugin.host import load
        from turnwise_testing.scaffold.project import Part, check_part, create, distribution_of, extend

        kind = check_part(arguments.kind, arguments.name, load())
        if arguments.into is None:
            folder = arguments.folder or Path(arguments.name)
            distribution = arguments.distribution or f"turnwise-{arguments.name.replace('_', '-')}"
            written = create(Part(kind=arguments.kind, name=arguments.name, distribution=distribution), kind, folder)
        else:
            folder = arguments.into
            part = Part(kind=arguments.kind, name=arguments.name, distribution=distribution_of(folder))
            written = extend(part, kind, folder)
        place = shlex.quote(str(folder))
        write_output("".join(f"wrote {path}\n" for path in written))
        write_output(f"\nNext:\n  pip install -e {place}\n  pytest {place}\n  turnwise check {arguments.name}\n")
        return OK
