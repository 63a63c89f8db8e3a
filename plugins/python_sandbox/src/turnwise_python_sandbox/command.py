"""`turnwise sandbox run FILE`: runs a program in the sandbox."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from turnwise import NoConfig, Resources
from turnwise.errors import ConfigError, DataError
from turnwise.terminal import write_error, write_output
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.result import RunResult, Status

_SUCCEEDED: Final = 0
_FAILED: Final = 1


class SandboxCommand:
    """Runs a file in the sandbox."""

    help = "run a Python file in isolation"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        """All options are on the command line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = "Examples:\n  turnwise sandbox run answer.py --timeout-s 5 --json"
        actions = parser.add_subparsers(metavar="ACTION", required=True)
        run = actions.add_parser("run", help="run a file; the program has an empty standard input")
        run.add_argument("file", help="Python file; - for standard input")
        run.add_argument("--json", action="store_true", help="print the whole result as JSON")
        _add_sandbox_options(run)

    def run(self, arguments: argparse.Namespace) -> int:
        return _run(arguments)


def _add_sandbox_options(parser: argparse.ArgumentParser) -> None:
    default = SandboxConfig()
    parser.add_argument("--timeout-s", type=float, default=default.timeout_s, help="wall-clock limit, seconds")
    parser.add_argument("--memory-mb", type=int, default=default.memory_mb, help="memory limit, MiB")
    parser.add_argument("--max-output-bytes", type=int, default=default.max_output_bytes, help="output limit, bytes")
    parser.add_argument("--tier", type=int, help="require this tier")
    parser.add_argument("--unsafe-subprocess", action="store_true", help="run without isolation if no tier works")


def _run(arguments: argparse.Namespace) -> int:
    from turnwise_python_sandbox.sandbox import Sandbox

    config = _build_config(arguments)
    code = _read_source(arguments.file)
    with Sandbox(config) as sandbox:
        result = sandbox.run(code)
    (_print_json if arguments.json else _print_streams)(result)
    return _SUCCEEDED if result.status is Status.OK else _FAILED


def _build_config(arguments: argparse.Namespace) -> SandboxConfig:
    options = ("timeout_s", "memory_mb", "max_output_bytes", "tier", "unsafe_subprocess")
    try:
        return SandboxConfig(servers=1, **{name: getattr(arguments, name) for name in options})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _read_source(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file}: {error}") from error


def _print_json(result: RunResult) -> None:
    write_output(json.dumps(result.to_json()) + "\n")


def _print_streams(result: RunResult) -> None:
    write_output(result.stdout.encode("utf-8", "replace").decode())
    write_error(result.stderr.encode("utf-8", "replace").decode())
    if result.status is not Status.OK:
        write_error(f"sandbox: {result.status.value}, exit code {result.exit_code}, tier {int(result.tier)}\n")
