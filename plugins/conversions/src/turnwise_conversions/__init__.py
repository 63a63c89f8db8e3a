"""Registers the command `convert`; `to_dataset`, `to_atif` and `to_chat` are for scripts and notebooks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from turnwise import Command, NoConfig, Registry, Resources, hookimpl

if TYPE_CHECKING:
    from turnwise_conversions.atif import to_atif
    from turnwise_conversions.demonstrations import Demonstration, encode_demonstration
    from turnwise_conversions.hf_dataset import to_dataset
    from turnwise_conversions.openai_chat import to_chat

__all__ = ["Demonstration", "encode_demonstration", "to_atif", "to_chat", "to_dataset"]

_HOMES = {
    "Demonstration": "demonstrations",
    "encode_demonstration": "demonstrations",
    "to_atif": "atif",
    "to_chat": "openai_chat",
    "to_dataset": "hf_dataset",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def make_convert(_config: NoConfig, _resources: Resources) -> Command:
    """Build the command."""
    from turnwise_conversions.convert_command import ConvertCommand

    return ConvertCommand()


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add `convert`."""
    registry.add("convert", make_convert)
