"""The middleware `tool_rate`: limits the calls of a tool in an episode, and in a second."""

from __future__ import annotations

import asyncio
import time

from turnwise import Resources, ToolResult
from turnwise.types import JsonObject
from turnwise_middleware.config import ToolRateConfig
from turnwise_middleware.interception import ToolUse
from turnwise_middleware.middleware import Middleware


class ToolRate(Middleware):
    """Refuses calls beyond the number for an episode, and delays calls beyond the number for a second."""

    name = "tool_rate"
    config: ToolRateConfig

    def __init__(self, config: ToolRateConfig, resources: Resources | None = None) -> None:
        super().__init__(config, resources)
        self._next_at: dict[str, float] = {}

    async def before_tool(self, use: ToolUse) -> JsonObject | ToolResult:
        """Return the arguments when the call may be made, or an error that the model reads."""
        config = self.config
        if config.tools and use.name not in config.tools:
            return use.arguments
        # No await between reading and writing, because calls of one turn run together.
        count = use.state[use.name] = use.state.get(use.name, 0) + 1
        if config.max_calls is not None and count > config.max_calls:
            text = f"Error: {use.name!r} may be called {config.max_calls} times; continue without it"
            return ToolResult(text=text, error=True)
        if config.per_second is not None:
            now = time.monotonic()
            starts_at = max(now, self._next_at.get(use.name, now))
            self._next_at[use.name] = starts_at + 1.0 / config.per_second
            await asyncio.sleep(starts_at - now)
        return use.arguments
