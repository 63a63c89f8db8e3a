"""Runs code the way `python main.py` does, in a fork of the server: a real `__main__`, its lines in tracebacks."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import json
import linecache
import os
import signal
import sys
import threading
import traceback
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final, NoReturn

from turnwise_python_sandbox.box.frames import FrameReader, frame

FILE_NAME: Final = "main.py"
OUT_OF_MEMORY_SIGNAL: Final = 62
"""A program that ends with MemoryError dies by this signal, which the wait status shows and no program uses."""
_FLUSH_FAILED: Final = 120
_INTERRUPTED: Final = 130
_READ_BYTES: Final = 65536


def run_file(fd: int) -> NoReturn:
    """Run the code that an open file holds, and end the process with the exit code that Python would give."""
    size = os.fstat(fd).st_size
    source = os.pread(fd, size, 0).decode("utf-8", "surrogatepass")
    os.close(fd)
    main = make_main(FILE_NAME)
    code = execute(source, main, FILE_NAME)
    finish(main, code)


def run_session(fd: int) -> NoReturn:
    """Run each frame that a stream brings in one `__main__`, and answer each with a frame, until the stream ends."""
    main = make_main(FILE_NAME)
    reader = FrameReader()
    cell = 0
    os.write(fd, frame(b'{"exit_code": 0}'))
    while data := _read(fd):
        for payload in reader.feed(data):
            cell += 1
            file_name = f"call_{cell}.py"
            code = execute(payload.decode("utf-8", "surrogatepass"), main, file_name)
            _flush()
            with contextlib.suppress(OSError):
                os.write(fd, frame(json.dumps({"exit_code": code}).encode()))
    os._exit(0)


def _read(fd: int) -> bytes:
    while True:
        # An interrupt that comes late, between two calls, concerns neither.
        with contextlib.suppress(KeyboardInterrupt):
            return os.read(fd, _READ_BYTES)


def make_main(file_name: str) -> ModuleType:
    """Return a fresh module, installed as `__main__`."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __file__=file_name, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv = [file_name]
    sys.excepthook = _print_uncaught
    threading.excepthook = _print_uncaught_in_thread
    return main


def execute(source: str, main: ModuleType, file_name: str) -> int:
    """Run code in a module and return its exit code; what it raises is printed as Python prints it."""
    linecache.cache[file_name] = (len(source), None, source.splitlines(keepends=True), file_name)
    try:
        code: CodeType = compile(source, file_name, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as error:
        return _exit_code(error.code)
    except KeyboardInterrupt:
        sys.stderr.write("KeyboardInterrupt\n")
        return _INTERRUPTED
    except MemoryError as error:
        _die_of_memory(error)
    except BaseException as error:  # noqa: BLE001 - whatever model code raises is its own affair
        _report(error)
        return 1
    return 0


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _report(error: BaseException) -> None:
    # The first frame is this module's own.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    try:
        sys.excepthook(type(error), error, frames)
    except MemoryError as second:
        _die_of_memory(second)
    except BaseException:  # noqa: BLE001 - a hook of model code, or a __str__ of its exception, that raises
        traceback.print_exc()


def _print_uncaught(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    # The interpreter's own hook reads source lines from disk, where this program is not.
    traceback.print_exception(kind, error, frames)


def _print_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is SystemExit:
        return
    name = arguments.thread.name if arguments.thread else "unknown"
    sys.stderr.write(f"Exception in thread {name}:\n")
    traceback.print_exception(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)


def _die_of_memory(error: MemoryError) -> NoReturn:
    with contextlib.suppress(BaseException):
        lines = traceback.format_exception(error.with_traceback(None))
        error.__traceback__ = error.__context__ = None
        gc.collect()
        _flush()
        os.write(2, "".join(lines).encode())
    signal.signal(OUT_OF_MEMORY_SIGNAL, signal.SIG_DFL)
    os.kill(os.getpid(), OUT_OF_MEMORY_SIGNAL)
    os._exit(1)


def finish(main: ModuleType, code: int) -> NoReturn:
    """
    End the process as the interpreter does: threads, exit functions, the module's own objects, buffers.

    The other modules are not taken down: freeing what is shared with the server would copy it first.
    """
    # The interpreter's own steps have no public names.
    steps = (threading._shutdown, atexit._run_exitfuncs, lambda: _clear(main))  # type: ignore[attr-defined] # noqa: SLF001
    for step in steps:
        try:
            step()
        except BaseException:  # noqa: BLE001 - as the interpreter does: said, and gone on
            traceback.print_exc()
    if not _flush():
        code = _FLUSH_FAILED
    os._exit(code)


def _clear(main: ModuleType) -> None:
    """Drop a module's names in the interpreter's order, so that `__del__` of its objects runs and may print."""
    names = main.__dict__
    private = [name for name in names if name.startswith("_") and not name.startswith("__")]
    for name in [*private, *(name for name in names if name != "__builtins__")]:
        names[name] = None
    gc.collect()


def _flush() -> bool:
    """Write out what is buffered, also where model code put something else in place of a stream."""
    good = True
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # noqa: BLE001 - model code may have replaced or broken it
            good = False
    return good
