"""
turnwise-verl-bridge: runs turnwise agents inside verl.

verl finds the agent loop `turnwise` by the entry point `verl.plugins`. `turnwise_verl_bridge.manager.TurnwiseManager`
is an `agent_loop_manager_class`. The engine `verl`, registered here, is a facade over verl's servers.
"""

from __future__ import annotations

from turnwise import Engine, Registry, Resources, hookimpl
from turnwise_verl_bridge.config import VerlEngineConfig


def make_verl(config: VerlEngineConfig, resources: Resources) -> Engine:
    """Build the facade; raise `ConfigError` outside verl, where there are no servers."""
    from turnwise_verl_bridge.engine import VerlEngine, current_client

    return VerlEngine(config, current_client())


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Add `verl`."""
    registry.add("verl", make_verl, config=VerlEngineConfig)
