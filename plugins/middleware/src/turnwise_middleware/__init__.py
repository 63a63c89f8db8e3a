"""The base class of middleware, and three that it registers: `redact_secrets`, `tool_rate` and `shape_reward`."""

from __future__ import annotations

from turnwise import Middleware as AnyMiddleware
from turnwise import Registry, Resources, hookimpl
from turnwise_middleware.config import RedactSecretsConfig, ShapeRewardConfig, ToolRateConfig
from turnwise_middleware.interception import EngineStage, ToolUse
from turnwise_middleware.middleware import Middleware

__all__ = [
    "EngineStage",
    "Middleware",
    "RedactSecretsConfig",
    "ShapeRewardConfig",
    "ToolRateConfig",
    "ToolUse",
    "register_middleware",
]


def make_redact_secrets(config: RedactSecretsConfig, resources: Resources) -> AnyMiddleware:
    """Build the middleware that removes secrets."""
    from turnwise_middleware.redact_secrets import RedactSecrets

    return RedactSecrets(config, resources)


def make_tool_rate(config: ToolRateConfig, resources: Resources) -> AnyMiddleware:
    """Build the middleware that limits calls."""
    from turnwise_middleware.tool_rate import ToolRate

    return ToolRate(config, resources)


def make_shape_reward(config: ShapeRewardConfig, resources: Resources) -> AnyMiddleware:
    """Build the middleware that shapes rewards."""
    from turnwise_middleware.shape_reward import ShapeReward

    return ShapeReward(config, resources)


@hookimpl
def register_middleware(registry: Registry[AnyMiddleware]) -> None:
    """Register all three."""
    registry.add("redact_secrets", make_redact_secrets, config=RedactSecretsConfig)
    registry.add("tool_rate", make_tool_rate, config=ToolRateConfig)
    registry.add("shape_reward", make_shape_reward, config=ShapeRewardConfig)
