"""
Middleware: acts before and after calls of parts, by the hooks `wrap_*`.

It has the base class, three that it registers (`redact_secrets`, `tool_rate` and `shape_reward`), and the hook
`register_middleware` by which other plugins add theirs.
"""

from __future__ import annotations

from turnwise import (
    Agent,
    Engine,
    HookSpecs,
    Postprocessor,
    Registry,
    Resources,
    Reward,
    RunInfo,
    Section,
    Tool,
    ToolParser,
    hookimpl,
)
from turnwise_middleware import middleware
from turnwise_middleware.config import RedactSecretsConfig, ShapeRewardConfig, ToolRateConfig
from turnwise_middleware.interception import EngineStage, ToolUse
from turnwise_middleware.middleware import Middleware, wrap_in

__all__ = [
    "EngineStage",
    "Middleware",
    "RedactSecretsConfig",
    "ShapeRewardConfig",
    "ToolRateConfig",
    "ToolUse",
    "config_section",
    "register_middleware",
    "wrap_agent",
    "wrap_engine",
    "wrap_postprocessor",
    "wrap_reward",
    "wrap_tool",
    "wrap_tool_parser",
]


def make_redact_secrets(config: RedactSecretsConfig, resources: Resources) -> Middleware:
    """Build the middleware that removes secrets."""
    from turnwise_middleware.redact_secrets import RedactSecrets

    return RedactSecrets(config, resources)


def make_tool_rate(config: ToolRateConfig, resources: Resources) -> Middleware:
    """Build the middleware that limits calls."""
    from turnwise_middleware.tool_rate import ToolRate

    return ToolRate(config, resources)


def make_shape_reward(config: ShapeRewardConfig, resources: Resources) -> Middleware:
    """Build the middleware that shapes rewards."""
    from turnwise_middleware.shape_reward import ShapeReward

    return ShapeReward(config, resources)


@hookimpl
def add_hookspecs(specs: HookSpecs) -> None:
    """Add the hook of middleware, which other plugins may use."""
    specs.add(middleware.register_middleware, part="middleware", contract=Middleware)


@hookimpl
def register_middleware(registry: Registry[Middleware]) -> None:
    """Register all three."""
    registry.add("redact_secrets", make_redact_secrets, config=RedactSecretsConfig)
    registry.add("tool_rate", make_tool_rate, config=ToolRateConfig)
    registry.add("shape_reward", make_shape_reward, config=ShapeRewardConfig)


@hookimpl
def config_section() -> Section:
    """The section is a list of middleware; the first is outside of the others."""
    return Section(kind="middleware", in_replicas=_wraps_engines)


def _wraps_engines(section: object) -> bool:
    parts = section if isinstance(section, tuple) else ()
    return any(isinstance(each, Middleware) and each.acts_on("engine") for each in parts)


@hookimpl
def wrap_engine(engine: Engine, run: RunInfo) -> Engine | None:
    """Wrap the lifecycle of the engine in middleware with a method for it."""
    from turnwise_middleware.wrappers import InterceptedEngine

    return wrap_in(engine, run, InterceptedEngine, "engine")


@hookimpl
def wrap_tool_parser(tool_parser: ToolParser, run: RunInfo) -> ToolParser | None:
    """Wrap the tool parser."""
    from turnwise_middleware.wrappers import InterceptedParser

    return wrap_in(tool_parser, run, InterceptedParser, "parse")


@hookimpl
def wrap_agent(agent: Agent, run: RunInfo) -> Agent | None:
    """Wrap an agent."""
    from turnwise_middleware.wrappers import InterceptedAgent

    # A parser knows no episode: the wrapper of the agent says which one runs.
    return wrap_in(agent, run, InterceptedAgent, "step", "parse")


@hookimpl
def wrap_tool(tool: Tool, run: RunInfo) -> Tool | None:
    """Wrap a tool."""
    from turnwise_middleware.wrappers import InterceptedSuspendableTool, InterceptedTool

    can_suspend = hasattr(tool, "suspend") and hasattr(tool, "restore")
    return wrap_in(tool, run, InterceptedSuspendableTool if can_suspend else InterceptedTool, "tool")


@hookimpl
def wrap_reward(reward: Reward, run: RunInfo) -> Reward | None:
    """Wrap the reward."""
    from turnwise_middleware.wrappers import InterceptedReward

    return wrap_in(reward, run, InterceptedReward, "reward")


@hookimpl
def wrap_postprocessor(postprocessor: Postprocessor, run: RunInfo) -> Postprocessor | None:
    """Wrap a postprocessor."""
    from turnwise_middleware.wrappers import InterceptedPostprocessor

    return wrap_in(postprocessor, run, InterceptedPostprocessor, "postprocess")
