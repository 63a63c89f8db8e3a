"""
turnwise-python-sandbox: runs Python that a model wrote, and nothing of it gets out but bytes.

The public API is `Sandbox` with `RunResult`, `Session` for interpreters that live on, and the tool `python`. What
starts processes is imported when it is first asked for, so that a run without code pays nothing for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from turnwise import Command, Registry, Tool, hookimpl
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

_LATER: Final = {"Sandbox": "sandbox", "Session": "session", "shared_sandbox": "sandbox"}
"""Public names by the module that they are imported from on first use."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


@hookimpl
def register_tools(registry: Registry[Tool]) -> None:
    """Add the tool `python`."""
    registry.add("python", PythonTool, config=PythonToolConfig)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add `turnwise sandbox`."""
    registry.add("sandbox", SandboxCommand)
