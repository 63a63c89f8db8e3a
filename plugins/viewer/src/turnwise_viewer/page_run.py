"""Serves a page about runs, or writes it to a file."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack

from turnwise.errors import ConfigError, describe
from turnwise.protocols.command import OK
from turnwise.terminal import write_error, write_output
from turnwise_viewer.export_arguments import check_export_arguments, export_runs
from turnwise_viewer.page_address import address_file, load_address, save_address
from turnwise_viewer.run_folder import RunFolder
from turnwise_viewer.viewer_server import ViewerServer


def show_runs(arguments: argparse.Namespace) -> int:
    """Serve the page until it is stopped, or write it, and return the exit code."""
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
