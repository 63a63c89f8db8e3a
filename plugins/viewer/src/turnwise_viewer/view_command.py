"""`turnwise view`: the episodes, groups, training and times of runs in a browser."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from turnwise.errors import ConfigError, describe
from turnwise.protocols.command import OK
from turnwise.terminal import write_error, write_output
from turnwise_viewer.export_arguments import add_export_arguments, check_export_arguments, export_runs
from turnwise_viewer.page_address import address_file, load_address, save_address
from turnwise_viewer.run_folder import RunFolder
from turnwise_viewer.viewer_server import ViewerServer


class ViewCommand:
    """Serves a page about runs until it is stopped, or writes the page to a file."""

    help = "show the episodes, groups, training curves and times of runs in a browser"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
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
        check_export_arguments(arguments)
        with ExitStack() as stack:
            runs = []
            for path in arguments.runs:
                run = RunFolder.open(path, may_be_empty=arguments.live)
                stack.callback(run.close)
                runs.append(run)
            if arguments.export is not None:
                export_runs(runs, arguments)
            else:
                asyncio.run(_serve(runs, arguments))
        return OK


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..65535")
    return number


async def _serve(runs: Sequence[RunFolder], arguments: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stopped.set)
    server = await (_start_live(runs, arguments) if arguments.live else _start(runs, arguments.port))
    try:
        write_output(f"{server.url}\n")
        sys.stdout.flush()
        if arguments.open:
            await asyncio.to_thread(webbrowser.open, server.url)
        await stopped.wait()
    finally:
        await server.stop()


async def _start(runs: Sequence[RunFolder], port: int, token: str = "") -> ViewerServer:
    server = ViewerServer(runs, port, token)
    try:
        await server.start()
    except OSError as error:
        await server.stop()
        raise ConfigError(f"--port {port}: cannot listen: {error.strerror}") from error
    return server


async def _start_live(runs: Sequence[RunFolder], arguments: argparse.Namespace) -> ViewerServer:
    """Start at the address of the last time, so that pages which are still open find the server."""
    file = address_file([run.path for run in runs])
    kept = load_address(file)
    if kept is not None and arguments.port in (0, kept.port):
        try:
            return await _start(runs, kept.port, kept.token)
        except ConfigError:
            if arguments.port:
                raise
            # Another view of these runs may have it, and keeps it for its next start.
            text = "another program has it, so a page that is still open cannot reconnect"
            write_error(f"turnwise: port {kept.port} of the last start: {text}\n")
            return await _start(runs, 0)
    server = await _start(runs, arguments.port)
    try:
        save_address(file, server.address)
    except OSError as error:
        text = "cannot be written, so a page cannot reconnect after a restart"
        write_error(f"turnwise: {file}: {text}: {describe(error)}\n")
    return server
