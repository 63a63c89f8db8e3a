"""
turnwise-verl-bridge: turnwise agents inside verl.

verl finds the agent loop `turnwise` by its own entry point, and takes `turnwise_verl_bridge.manager.TurnwiseManager` as
its `agent_loop_manager_class`. The engine `verl`, registered here, is a facade over verl's own servers.
"""

from __future__ import annotations

from turnwise import Engine, Registry, Resources, hookimpl
from turnwise_verl_bridge.config import VerlEngineConfig


def make_verl(config: VerlEngineConfig, resources: Resources) -> Engine:
    """Build the facade; `ConfigError` outside verl, where there is no server to ask."""
    from turnwise_verl_bridge.engine import VerlEngine, bound_client

    return VerlEngine(config, bound_client())


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Add `verl`."""
    registry.add("verl", make_verl, config=VerlEngineConfig)
