"""Runs code as `python main.py` does, in a fork of the server: in a real `__main__`, with its lines in tracebacks."""

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
from typing import Final, NoReturn

from turnwise_python_sandbox.box.descriptor_forms import hide_frames
from turnwise_python_sandbox.box.frames import FrameReader, encode_frame

FILE_NAME: Final = "main.py"
OUT_OF_MEMORY_SIGNAL: Final = 62
"""Ends a program that failed with MemoryError, so that the wait status shows it; no program uses this signal."""
_FLUSH_FAILED: Final = 120
_INTERRUPTED: Final = 130
_READ_BYTES: Final = 65536


def run_file(fd: int) -> NoReturn:
    """Run the code in an open file, and end the process with the exit code that Python would have."""
    size = os.fstat(fd).st_size
    source = os.pread(fd, size, 0).decode("utf-8", "surrogatepass")
    os.close(fd)
    main = create_main_module(FILE_NAME)
    code = execute(source, main, FILE_NAME)
    shut_down(main, code)


def run_session(fd: int) -> NoReturn:
    """Run the code in each frame of a stream in one `__main__`; reply to each with its number and exit code."""
    main = create_main_module(FILE_NAME)
    reader = FrameReader()
    num_calls = 0
    # Tells the session that the interpreter is up.
    os.write(fd, encode_frame(b'{"exit_code": 0}'))
    while data := _read(fd):
        for payload in reader.feed(data):
            num_calls += 1
            file_name = f"call_{num_calls}.py"
            code = execute(payload.decode("utf-8", "surrogatepass"), main, file_name)
            _flush_streams()
            with contextlib.suppress(OSError):
                os.write(fd, encode_frame(json.dumps({"call": num_calls, "exit_code": code}).encode()))
    os._exit(0)


def _read(fd: int) -> bytes:
    while True:
        # An interrupt that arrives between two calls belongs to neither.
        with contextlib.suppress(KeyboardInterrupt):
            return os.read(fd, _READ_BYTES)


def create_main_module(file_name: str) -> ModuleType:
    """Return an empty module, installed as `__main__`."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __file__=file_name, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv = [file_name]
    sys.excepthook = _print_uncaught
    threading.excepthook = _print_uncaught_in_thread
    return main


def execute(source: str, main: ModuleType, file_name: str) -> int:
    """Run code in a module and return its exit code; print an uncaught exception as Python does."""
    linecache.cache[file_name] = (len(source), None, source.splitlines(keepends=True), file_name)
    try:
        code: CodeType = compile(source, file_name, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as error:
        return _to_exit_code(error.code)
    except KeyboardInterrupt:
        sys.stderr.write("KeyboardInterrupt\n")
        return _INTERRUPTED
    except MemoryError as error:
        _die_of_memory(error)
    except BaseException as error:  # noqa: BLE001 - model code may raise anything
        _print_exception(error)
        return 1
    return 0


def _to_exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _print_exception(error: BaseException) -> None:
    # The first frame is `execute`, which is not the program's.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    hide_frames(frames)
    try:
        sys.excepthook(type(error), error, frames)
    except MemoryError as second:
        _die_of_memory(second)
    except BaseException:  # noqa: BLE001 - model code may have set a hook, or a __str__, that raises
        traceback.print_exc()


def _print_uncaught(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    # The interpreter's own hook reads source lines from disk, and the program is not on disk.
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
        # The frames hold the program's objects; without them there is memory to print with.
        error.__traceback__ = error.__context__ = None
        gc.collect()
        _flush_streams()
        os.write(2, "".join(lines).encode())
    signal.signal(OUT_OF_MEMORY_SIGNAL, signal.SIG_DFL)
    os.kill(os.getpid(), OUT_OF_MEMORY_SIGNAL)
    os._exit(1)


def shut_down(main: ModuleType, code: int) -> NoReturn:
    """
    End the process as the interpreter does: join threads, run exit functions, clear `__main__`, flush the streams.

    Other modules stay, because the process would have to copy the pages that it shares with the server to free them.
    """
    shut_down_threads = threading._shutdown  # type: ignore[attr-defined] # noqa: SLF001 - it has no public name
    steps = (shut_down_threads, atexit._run_exitfuncs, lambda: _clear(main))  # noqa: SLF001 - it has no public name
    for step in steps:
        try:
            step()
        except BaseException:  # noqa: BLE001 - the interpreter too prints the error and continues
            traceback.print_exc()
    if not _flush_streams():
        code = _FLUSH_FAILED
    os._exit(code)


def _clear(main: ModuleType) -> None:
    """Drop a module's names, private ones first, so that the `__del__` of their objects runs and may print."""
    names = main.__dict__
    private = [name for name in names if name.startswith("_") and not name.startswith("__")]
    for name in [*private, *(name for name in names if name != "__builtins__")]:
        names[name] = None
    gc.collect()


def _flush_streams() -> bool:
    """Flush the standard streams, the original ones too if model code replaced them; return whether all worked."""
    succeeded = True
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # noqa: BLE001 - model code may have replaced or broken it
            succeeded = False
    return succeeded
