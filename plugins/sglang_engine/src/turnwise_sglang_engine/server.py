"""
The main program of SGLang's process: makes the engine, and serves frames until a stop frame.

`sglang.Engine` changes signal handlers, the start method of processes and the event loop policy of its process, and at
the end it kills all children or the process itself. So it runs in a separate process, started as
``python -m turnwise_sglang_engine.server FD`` with the settings on standard input. SGLang's children import this module
again, so it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from turnwise_engine_support.arguments import unknown_argument
from turnwise_engine_support.error_lines import error_line
from turnwise_sglang_engine import stub_packages
from turnwise_sglang_engine.frames import Frame, Link, pack
from turnwise_sglang_engine.pictures import reads_pictures
from turnwise_sglang_engine.served_pictures import ServedPictures
from turnwise_sglang_engine.service import Service

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    stub_packages.install()

_PARENT_POLL_S = 0.5


class SettingsError(Exception):
    """An argument for SGLang is wrong. The text is for the user."""


def main() -> None:
    """Serve the parent process."""
    settings = json.load(sys.stdin)
    threading.Thread(target=_exit_with_parent, args=(settings["parent"],), daemon=True).start()
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        import sglang

        # The names of the package are lazy. Importing this one reports a broken installation here.
        import sglang.srt.entrypoints.engine
    except Exception as error:  # noqa: BLE001 - broken installations raise anything
        _fail(connection, f"cannot import SGLang: {error_line(error)}")
    asyncio.run(_serve(connection, sglang, settings))


def _exit_with_parent(parent: int) -> None:
    """Kill this process and its children once the parent has ended, even if the parent was killed."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def _fail(connection: socket.socket, error: str) -> None:
    """Send the reason to the parent, and exit."""
    connection.setblocking(True)
    connection.sendall(pack(Frame({"op": "failed", "error": error})))
    connection.close()
    os._exit(1)


def check_arguments(arguments: Mapping[str, object], server_args: Any, version: str) -> None:
    """Raise `SettingsError` for an argument that this version of SGLang does not have."""
    known = list(inspect.signature(server_args).parameters)
    if error := unknown_argument(arguments, known):
        raise SettingsError(f"SGLang {version} has {error}")


def _make_engine(sglang: Any, arguments: dict[str, Any]) -> Any:
    from sglang.srt.server_args import ServerArgs

    check_arguments(arguments, ServerArgs, sglang.__version__)
    return sglang.Engine(**arguments)


def _make_pictures(arguments: Mapping[str, Any]) -> ServedPictures | None:
    """Return the pictures of requests, if the model reads some. Called before SGLang reads its environment."""
    directory = Path(arguments["model_path"])
    return ServedPictures(directory) if reads_pictures(arguments, directory) else None


async def _serve(connection: socket.socket, sglang: Any, settings: dict[str, Any]) -> None:
    try:
        pictures = _make_pictures(settings["arguments"])
        # On the loop's own thread: SGLang's sockets and signal handlers belong to it.
        engine = _make_engine(sglang, settings["arguments"])
    except SettingsError as error:
        _fail(connection, str(error))
    except Exception as error:  # noqa: BLE001 - SGLang raises anything for sizes, files and devices
        _fail(connection, f"SGLang did not start: {error_line(error)}")
    num_nodes = settings["arguments"].get("nnodes", 1)
    if settings["arguments"].get("node_rank", 0):
        await _serve_follower(connection, sglang, engine)
    from sglang.srt.managers import io_struct
    from sglang.srt.utils import MultiprocessingSerializer

    gone = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        service = Service(
            manager=engine.tokenizer_manager,
            structs=io_struct,
            serialize=MultiprocessingSerializer.serialize,
            num_ranks=settings["arguments"]["tp_size"],
            num_nodes=num_nodes,
            pictures=pictures,
            group=group,
        )
        link = Link(lambda frame: _dispatch(frame, service, gone), gone.set)
        service.send = link.send
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=connection)
        link.send({"op": "ready", "version": sglang.__version__, **_sizes(engine)})
        await gone.wait()
        # Waits for SGLang's children to free their memory. Nothing else in this process needs a clean exit.
        engine.shutdown()
        os._exit(0)


async def _serve_follower(connection: socket.socket, sglang: Any, engine: Any) -> NoReturn:
    """Run schedulers that another node's server sends the requests to, until a stop frame."""
    gone = asyncio.Event()
    link = Link(lambda _frame: gone.set(), gone.set)
    connection.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=connection)
    # SGLang watches the schedulers only on the node that has the requests.
    wait = engine._scheduler_init_result.block_until_scheduler_exits  # noqa: SLF001 - SGLang has no public way to them
    threading.Thread(target=_exit_with_schedulers, args=(wait, gone), daemon=True).start()
    link.send({"op": "ready", "version": sglang.__version__, **_sizes(engine)})
    await gone.wait()
    engine.shutdown()
    os._exit(0)


def _exit_with_schedulers(wait: Callable[[], None], gone: asyncio.Event) -> None:
    """Exit once the schedulers have ended, which closes the connection and so tells the parent."""
    wait()
    if not gone.is_set():
        os._exit(1)


def _dispatch(frame: Frame, service: Service, gone: asyncio.Event) -> None:
    if frame.head["op"] == "stop":
        gone.set()
    else:
        service.receive(frame)


def _sizes(engine: Any) -> dict[str, int]:
    (info, *_) = engine._scheduler_init_result.scheduler_infos  # noqa: SLF001 - SGLang has no public way to the sizes
    return {"num_cache_tokens": info["max_total_num_tokens"]}


if __name__ == "__main__":
    main()
