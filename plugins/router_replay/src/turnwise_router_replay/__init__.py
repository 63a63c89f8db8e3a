"""
Router replay (R3, arXiv:2510.11370): the trainer computes each token with the experts that the engine chose for it.

It registers the column `routed_experts`, which engines fill, and the replay `router_replay` of the trainer.
"""

from __future__ import annotations

from typing import Any, Final

from turnwise import ColumnSpec, NoConfig, Registry, Resources, hookimpl
from turnwise_moe_routes.shapes import COLUMN, RouteShape, read_shape

_NO_EXPERTS: Final = RouteShape(num_layers=1, top_k=1, num_experts=1)
"""The column of a run whose model has no experts, or is not known: no record has it."""


def declare_routes(config: NoConfig, resources: Resources) -> ColumnSpec:
    """Return the declaration of `routed_experts`, (layers, top_k) of the run's model."""
    return (read_shape(resources.model.path) or _NO_EXPERTS).column


def make_replay(config: NoConfig, resources: Resources) -> Any:
    """Build the replay."""
    from turnwise_router_replay.replay import RouterReplay

    return RouterReplay()


@hookimpl
def register_columns(registry: Registry[ColumnSpec]) -> None:
    """Declare `routed_experts`."""
    registry.add(COLUMN, declare_routes)


@hookimpl(optionalhook=True)  # of the trainer: bridges to other trainers need the column alone
def register_replays(registry: Registry[Any]) -> None:
    """Register `router_replay`."""
    registry.add("router_replay", make_replay)
