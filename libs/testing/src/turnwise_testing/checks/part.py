"""The checks of each kind of part, which suites for pytest and ``turnwise check`` share."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from turnwise.protocols import Chat, ModelSpec, Resources
from turnwise_testing.checks.check import Check


@frozen(kw_only=True)
class Part:
    """
    A part under test.

    Attributes:
        make: builds it, as its registered factory does.
        name: its registered name.
        resources: that it is built with.
        examples: inputs with their expected outputs, of the class that its kind has for them.
    """

    make: Callable[[], Any]
    name: str
    resources: Resources
    examples: tuple[Any, ...] = ()

    @property
    def chat(self) -> Chat:
        """The chat of its resources, or the test kit's own."""
        from turnwise_testing.probes.agent import probe_chat

        return self.resources.chat or probe_chat()


def no_resources(_folder: Path) -> Resources:
    """Return empty resources."""
    return Resources()


def chat_resources(_folder: Path) -> Resources:
    """Return resources with a chat template over bytes."""
    from turnwise_testing.probes.agent import probe_chat

    return Resources(chat=probe_chat())


def vocab_size_of(model: ModelSpec) -> int | None:
    """Return the number of ids that a model's config declares; None without such a file."""
    file = model.path and model.path / "config.json"
    if file is None or not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


@frozen(kw_only=True)
class PartChecks:
    """
    The checks of a kind of part.

    Attributes:
        checks: functions of a probe, each by its name without `check_`.
        probe: returns the probe of a part.
        resources: makes the resources that a part is built with; it may write to the given folder.
        examples: what a suite must give for the fixture `examples`; empty if the checks need none.
        usual: examples for ``turnwise check``, which knows no better ones.
    """

    checks: Mapping[str, Check]
    probe: Callable[[Part], Any]
    resources: Callable[[Path], Resources] = no_resources
    examples: str = ""
    usual: tuple[Any, ...] = ()


KINDS: Final[Mapping[str, str]] = {
    "adapters": "adapter:ADAPTERS",
    "advantages": "objective:ADVANTAGES",
    "agents": "agent:AGENTS",
    "chats": "chat:CHATS",
    "columns": "column:COLUMNS",
    "commands": "command:COMMANDS",
    "diagnostics": "diagnostic:DIAGNOSTICS",
    "group_rewards": "group_reward:GROUP_REWARDS",
    "interactions": "interaction:INTERACTIONS",
    "losses": "objective:LOSSES",
    "middleware": "wrapper:MIDDLEWARE",
    "observers": "observer:OBSERVERS",
    "postprocessors": "postprocessor:POSTPROCESSORS",
    "reasoning_parsers": "reasoning:REASONING_PARSERS",
    "rewards": "reward:REWARDS",
    "routers": "router:ROUTERS",
    "scorers": "scorer:SCORERS",
    "task_sources": "task_source:TASK_SOURCES",
    "tools": "tool:TOOLS",
    "weight_transports": "transport:WEIGHT_TRANSPORTS",
    "workspaces": "workspace_snapshots:WORKSPACES",
}
"""
The kinds whose parts are checked in the same way: module and name of their `PartChecks`, imported on demand, because
some load torch. Engines, tool parsers, environments and the hooks `wrap_*` have separate suites.
"""


def checks_of(kind: str) -> PartChecks:
    """Return the checks of a kind in the table."""
    module, _, name = KINDS[kind].partition(":")
    found: PartChecks = getattr(importlib.import_module(f"turnwise_testing.checks.{module}"), name)
    return found
