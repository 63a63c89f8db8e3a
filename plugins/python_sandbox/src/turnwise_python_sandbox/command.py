"""`turnwise sandbox run FILE` and `turnwise sandbox doctor`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from turnwise.errors import DataError
from turnwise.protocols import Resources
from turnwise.registry import NoConfig
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.result import RunResult, Status

_OK: Final = 0
_FAILED: Final = 1


class SandboxCommand:
    """Run a file in the sandbox, or say what isolation this machine offers."""

    help = "run Python in isolation, or see what isolation this machine offers"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        """Take nothing: the options are on the command line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `run FILE [--json]` and `doctor [--json]`."""
        parser.epilog = "Examples:\n  turnwise sandbox doctor\n  turnwise sandbox run answer.py --timeout-s 5 --json"
        actions = parser.add_subparsers(metavar="ACTION", required=True)
        run = actions.add_parser("run", help="run a file; standard input is not passed on")
        run.add_argument("file", help="Python file; - for standard input")
        run.add_argument("--json", action="store_true", help="print the whole result as JSON")
        _add_options(run)
        run.set_defaults(action=_run)
        doctor = actions.add_parser("doctor", help="try every tier and say what each promises")
        doctor.add_argument("--json", action="store_true", help="print JSON")
        doctor.set_defaults(action=_doctor)

    def run(self, arguments: argparse.Namespace) -> int:
        """Do what was asked; 1 when the program, or every tier, failed."""
        code: int = arguments.action(arguments)
        return code


def _add_options(parser: argparse.ArgumentParser) -> None:
    default = SandboxConfig()
    parser.add_argument("--timeout-s", type=float, default=default.timeout_s, help="wall-clock limit, seconds")
    parser.add_argument("--memory-mb", type=int, default=default.memory_mb, help="memory limit, MiB")
    parser.add_argument("--max-output-bytes", type=int, default=default.max_output_bytes, help="output limit, bytes")
    parser.add_argument("--tier", type=int, help="use this tier or fail")
    parser.add_argument("--unsafe-subprocess", action="store_true", help="run without isolation if none works")


def _run(arguments: argparse.Namespace) -> int:
    from turnwise_python_sandbox.sandbox import Sandbox

    options = ("timeout_s", "memory_mb", "max_output_bytes", "tier", "unsafe_subprocess")
    config = SandboxConfig(servers=1, **{name: getattr(arguments, name) for name in options})
    code = _source(arguments.file)
    with Sandbox(config) as sandbox:
        result = sandbox.run(code)
    (_print_json if arguments.json else _print_streams)(result)
    return _OK if result.status is Status.OK else _FAILED


def _source(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file}: {error}") from error


def _print_json(result: RunResult) -> None:
    sys.stdout.write(json.dumps(result.to_json()) + "\n")


def _print_streams(result: RunResult) -> None:
    sys.stdout.write(result.stdout.encode("utf-8", "replace").decode())
    sys.stderr.write(result.stderr.encode("utf-8", "replace").decode())
    if result.status is not Status.OK:
        sys.stderr.write(f"sandbox: {result.status.value}, exit code {result.exit_code}, tier {int(result.tier)}\n")


def _doctor(arguments: argparse.Namespace) -> int:
    from turnwise_python_sandbox.doctor import report

    found: dict[str, Any] = report()
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        for line in found["lines"]:
            sys.stdout.write(line + "\n")
    return _OK if found["default_tier"] is not None else _FAILED
