"""Registers the interactions `scripted_user` and `model_user`."""

from __future__ import annotations

from turnwise import Interaction, Registry, Resources, hookimpl
from turnwise_simulated_users.config import ModelUserConfig, ScriptedUserConfig


def make_scripted_user(config: ScriptedUserConfig, _resources: Resources) -> Interaction:
    """Build the scripted user."""
    from turnwise_simulated_users.scripted_user import ScriptedUser

    return ScriptedUser(config)


def make_model_user(config: ModelUserConfig, resources: Resources) -> Interaction:
    """Build the user that a model plays; `ConfigError` when the run has no judge."""
    from turnwise_simulated_users.model_user import ModelUser

    return ModelUser(config, resources)


@hookimpl
def register_interactions(registry: Registry[Interaction]) -> None:
    """Register both users."""
    registry.add("scripted_user", make_scripted_user, config=ScriptedUserConfig)
    registry.add("model_user", make_model_user, config=ModelUserConfig)
