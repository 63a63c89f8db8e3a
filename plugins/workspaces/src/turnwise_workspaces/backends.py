"""Builds the backend that a config names."""

from __future__ import annotations

from turnwise import PluginRecipe, Resources
from turnwise.config.parts import Choice
from turnwise_workspaces.workspace import WorkspaceBackend

KIND = "workspaces"


def build_backend(choice: Choice, resources: Resources) -> WorkspaceBackend:
    """
    Build a backend.

    Raises:
        PluginError: the name is unknown, or the backend cannot be built.
        ConfigError: the options do not fit.
    """
    from turnwise.config.resolve import build_part
    from turnwise.plugin.host import load

    # Most runs name a backend of this package, and loading every plugin takes longer than a box.
    host = load(PluginRecipe(allow=(KIND,)))
    if choice.name not in host.registry(KIND):
        host = load(PluginRecipe())
    backend: WorkspaceBackend = build_part(host, KIND, choice, resources, path="backend")
    return backend
