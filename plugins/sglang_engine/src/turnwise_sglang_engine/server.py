"""
SGLang's process: makes the engine, and answers frames until it is told to stop.

`sglang.Engine` changes the process that it runs in: signal handlers, the start method of processes, the policy of event
loops, and an end that kills every child there is, or the process itself. So it has this one to itself. Started as
``python -m turnwise_sglang_engine.server FD`` with the settings on the standard input. Its children import this module
again, so it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from turnwise_sglang_engine import stand_ins
from turnwise_sglang_engine.frames import Frame, Link, pack
from turnwise_sglang_engine.service import Service

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    stand_ins.install()

_PARENT_POLL_S = 0.5


class SettingsError(Exception):
    """What SGLang was to be started with is wrong; the text is for a person."""


def main() -> None:
    """Serve the process that started this one."""
    settings = json.load(sys.stdin)
    threading.Thread(target=_die_with, args=(settings["parent"],), daemon=True).start()
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        sglang = importlib.import_module("sglang")
        # The package's names are lazy: whatever does not import fails here, where it can be told.
        importlib.import_module("sglang.srt.entrypoints.engine")
    except Exception as error:  # noqa: BLE001 - broken installations raise anything
        _fail(connection, f"SGLang cannot be imported: {_first_line(error)}")
    asyncio.run(_serve(connection, sglang, settings))


def _die_with(parent: int) -> None:
    """End this process and its children when the one that started it has gone, however it went."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def _fail(connection: socket.socket, error: str) -> None:
    """Say why there is no engine, and end."""
    connection.setblocking(True)
    connection.sendall(pack(Frame({"op": "failed", "error": error})))
    connection.close()
    os._exit(1)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def check_arguments(arguments: Mapping[str, Any], server_args: Any, version: str) -> None:
    """Raise `SettingsError` for an argument that this version of SGLang has not."""
    known = list(inspect.signature(server_args).parameters)
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise SettingsError(f"SGLang {version} has no argument {name!r} for engine_args{hint}")


def _make_engine(sglang: Any, arguments: dict[str, Any]) -> Any:
    server_args = importlib.import_module("sglang.srt.server_args").ServerArgs
    check_arguments(arguments, server_args, sglang.__version__)
    return sglang.Engine(**arguments)


async def _serve(connection: socket.socket, sglang: Any, settings: dict[str, Any]) -> None:
    try:
        # On the loop's own thread: SGLang's sockets and signal handlers belong to it.
        engine = _make_engine(sglang, settings["arguments"])
    except SettingsError as error:
        _fail(connection, str(error))
    except Exception as error:  # noqa: BLE001 - SGLang raises anything for sizes, files and devices
        _fail(connection, f"SGLang did not start: {_first_line(error)}")
    gone = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        service = Service(
            manager=engine.tokenizer_manager,
            structs=importlib.import_module("sglang.srt.managers.io_struct"),
            serialize=importlib.import_module("sglang.srt.utils").MultiprocessingSerializer.serialize,
            num_ranks=settings["arguments"]["tp_size"],
            group=group,
        )
        link = Link(lambda frame: _received(frame, service, gone), gone.set)
        service.send = link.send
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=connection)
        link.send({"op": "ready", "version": sglang.__version__, **_sizes(engine)})
        await gone.wait()
        # Everything else in this process exists for the connection. SGLang waits for its children and their memory.
        engine.shutdown()
        os._exit(0)


def _received(frame: Frame, service: Service, gone: asyncio.Event) -> None:
    if frame.head["op"] == "stop":
        gone.set()
    else:
        service.receive(frame)


def _sizes(engine: Any) -> dict[str, int]:
    (info, *_) = engine._scheduler_init_result.scheduler_infos  # noqa: SLF001 - there is no public way to the sizes
    return {"num_cache_tokens": info["max_total_num_tokens"]}


if __name__ == "__main__":
    main()
