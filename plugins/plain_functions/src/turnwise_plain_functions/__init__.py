"""
Plain Python functions as parts of a run.

The adapter `functions` lets a config or a program name a function as an agent, a reward, a simulated user, a
postprocessor or a tool. The decorators `tool` and `reward` make the parts themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise import Adapter, NoConfig, Registry, Resources, hookimpl

if TYPE_CHECKING:
    from turnwise_plain_functions.function_tool import tool
    from turnwise_plain_functions.parts import reward

__all__ = ["make_adapter", "register_adapters", "reward", "tool"]


def __getattr__(name: str) -> object:
    # Where they are asked for: a process that only loads the plugins needs no event loop.
    if name == "tool":
        from turnwise_plain_functions.function_tool import tool

        return tool
    if name == "reward":
        from turnwise_plain_functions.parts import reward

        return reward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_adapter(_config: NoConfig, resources: Resources) -> Adapter:
    """Build the adapter."""
    from turnwise_plain_functions.adapter import FunctionAdapter

    return FunctionAdapter(resources)


@hookimpl
def register_adapters(registry: Registry[Adapter]) -> None:
    """Register `functions`."""
    registry.add("functions", make_adapter)
