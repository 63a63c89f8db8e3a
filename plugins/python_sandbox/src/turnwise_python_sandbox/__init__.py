"""
turnwise-python-sandbox: runs Python that a model wrote, isolated from the host.

The public API is `Sandbox` with `RunResult`, `Session` for interpreters that keep their state between calls, and the
tool `python`. The modules that start processes are imported on first use, so that a run without code does not pay for
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from turnwise import Command, Diagnostic, NoConfig, Registry, Resources, Tool, hookimpl
from turnwise_python_sandbox.command import SandboxCommand
from turnwise_python_sandbox.config import PythonToolConfig, SandboxConfig
from turnwise_python_sandbox.result import RunResult, SandboxUnavailableError, Status, Tier
from turnwise_python_sandbox.tool import PythonTool

if TYPE_CHECKING:
    from turnwise_python_sandbox.sandbox import Sandbox, shared_sandbox
    from turnwise_python_sandbox.session import Session

__all__ = [
    "PythonTool",
    "PythonToolConfig",
    "RunResult",
    "Sandbox",
    "SandboxConfig",
    "SandboxUnavailableError",
    "Session",
    "Status",
    "Tier",
    "shared_sandbox",
]

_IMPORTED_ON_FIRST_USE: Final = ("Sandbox", "Session", "shared_sandbox")


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from turnwise_python_sandbox import sandbox

    return getattr(sandbox, name)


@hookimpl
def register_tools(registry: Registry[Tool]) -> None:
    """Register the tool `python`."""
    registry.add("python", PythonTool, config=PythonToolConfig)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Register `turnwise sandbox`."""
    registry.add("sandbox", SandboxCommand)


def make_diagnostic(_config: NoConfig, _resources: Resources) -> Diagnostic:
    """Return the checks of the sandbox: a module with a function `diagnose` is a `Diagnostic`."""
    from turnwise_python_sandbox import diagnosis

    return diagnosis


@hookimpl
def register_diagnostics(registry: Registry[Diagnostic]) -> None:
    """Register the checks of the sandbox."""
    registry.add("python_sandbox", make_diagnostic)
