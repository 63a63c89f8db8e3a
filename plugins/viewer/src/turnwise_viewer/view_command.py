"""`turnwise view`: the episodes, groups, training and times of runs in a browser."""

from __future__ import annotations

import argparse
from pathlib import Path


class ViewCommand:
    """Serves a page about runs until it is stopped, or writes the page to a file."""

    help = "show the episodes, groups, training curves and times of runs in a browser"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from turnwise_viewer.export_arguments import add_export_arguments

        parser.epilog = (
            "Examples:\n"
            "  turnwise view runs/first\n"
            "  turnwise view runs/train runs/other --open\n"
            "  turnwise view runs/first --port 8080\n"
            "  turnwise view --live runs/next\n"
            "  turnwise view runs/first --export failed.html --status failed\n"
            "  turnwise view runs/first --export two.html --episodes task-0001/0 task-0001/3\n\n"
            "Prints the address of a page that only this machine can open. The address contains a token, so keep it\n"
            "to yourself. The page follows a run in progress: it has the episodes that are on the disk. With --live a\n"
            "run may start later, and the address stays the same: an open page connects again after a restart.\n"
            "On another machine: ssh -L PORT:127.0.0.1:PORT HOST, and open the printed address. Ctrl-C ends it.\n"
            "With --export the command writes the page to a file, which opens in a browser without this command."
        )
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or a file of episodes")
        parser.add_argument("--port", type=_port, default=0, metavar="N", help="port of the page; 0 takes a free one")
        parser.add_argument(
            "--live",
            action="store_true",
            help="wait for runs that do not exist yet, and keep the address for the next start",
        )
        parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
        add_export_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise_viewer.page_run import show_runs

        return show_runs(arguments)


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..65535")
    return number
