"""Options of the engine, the agent, the tools and the interaction that are named `verl`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen, validators


@frozen(kw_only=True)
class VerlEngineConfig:
    """
    Options of the facade over verl's servers; the bridge sets them from verl's config.

    Attributes:
        max_context: limit of prompt and response tokens together; null leaves the check to verl. This engine
            works only inside verl.
        enable_return_routed_experts: verl's servers return the experts of a mixture; with verl's
            `enable_rollout_routing_replay`.
    """

    max_context: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    enable_return_routed_experts: bool = False


@frozen(kw_only=True)
class VerlAgentConfig:
    """
    An agent loop that was written for verl.

    Attributes:
        loop: class of the loop, as `package.module.Name`; beside `file` the name of a class in a Python file, or of an
            entry in verl's YAML file. It needs verl beside turnwise.
        file: a Python file, or the YAML file of verl's `agent_loop_config_path`; null imports `loop` as a module.
        modules: modules, with everything in them, that a class may come from.
        config: values of verl's config that the loop reads, by their dotted names, such as
            `actor_rollout_ref.rollout.multi_turn.max_assistant_turns: 5`. The others are verl's defaults.
        options: keyword arguments of the class.
    """

    loop: str = ""
    file: Path | None = None
    modules: tuple[str, ...] = ("verl",)
    config: Mapping[str, Any] = field(factory=dict)
    options: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class VerlToolsConfig:
    """
    Tools that verl's YAML file describes.

    Attributes:
        file: with `tools`, each of them with `class_name`, `config` and `tool_schema`; verl's `tool_config_path`.
        modules: modules, with everything in them, that `class_name` may name.
        session: `episode` keeps an instance of a tool for the whole episode, and `calc_reward` scores it at the end;
            `call` makes one for each call, as verl's agent loop does.
    """

    file: Path
    modules: tuple[str, ...] = ("verl",)
    session: Literal["episode", "call"] = field(default="episode", validator=validators.in_(("episode", "call")))


@frozen(kw_only=True)
class VerlInteractionConfig:
    """
    Simulated users that verl's YAML file describes.

    Attributes:
        file: with `interaction`, each of them with `class_name`, `config` and perhaps `name`; verl's
            `interaction_config_path`.
        modules: modules, with everything in them, that `class_name` may name.
    """

    file: Path
    modules: tuple[str, ...] = ("verl",)
