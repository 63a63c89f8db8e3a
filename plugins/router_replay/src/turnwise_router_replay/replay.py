"""The replay `router_replay`: the policy's layers choose the experts that the engine reported."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field

from turnwise import Capabilities
from turnwise.errors import ConfigError, TrajectoryError
from turnwise.protocols import ModelSpec
from turnwise_moe_routes.shapes import COLUMN, UNKNOWN, RouteShape, read_shape

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise_moe_routes.forcing import RouteForcer


@define(eq=False)
class RouterReplay:
    """
    See `turnwise_grpo_trainer.objective.replays.Replay`.

    The selected experts are the engine's; their weights are those of the policy's router, which has its gradient. A
    token without routes has the experts of the policy's router.
    """

    column: ClassVar[str] = COLUMN
    _forcer: RouteForcer | None = field(default=None, init=False)

    def check(self, model: ModelSpec) -> None:
        """Raise `ConfigError` if the model has no experts, by its `config.json`."""
        self._shape(model)

    def check_engine(self, engine: Capabilities, name: str) -> None:
        """Raise `ConfigError` if the results of the engine have no routes."""
        if COLUMN not in engine.columns:
            raise ConfigError(
                f"train.replays: router_replay needs the experts that the engine chose, and {name!r} does not return"
                " them; set engine.enable_return_routed_experts: true, which transformers, vllm and sglang have"
            )

    def prepare(self, policy: Any, model: ModelSpec) -> None:
        """Find the layers of the loaded policy; `ConfigError` if their experts cannot be replaced."""
        from turnwise_moe_routes.forcing import RouteForcer

        self._forcer = RouteForcer(policy, self._shape(model))
        try:
            self._forcer.check()
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"train.replays: router_replay: {error}") from error

    def read(self, values: Tensor) -> Tensor:
        """Return (N, layers, top_k) routes; `TrajectoryError` for an expert that the model does not have."""
        shape = self._running().shape
        if values.shape[1:] != (shape.num_layers, shape.top_k):
            raise TrajectoryError(
                f"column {COLUMN!r} has values of shape {tuple(values.shape[1:])}, and the model has {shape.num_layers}"
                f" layers and {shape.top_k} experts for each token"
            )
        if values.numel() and not UNKNOWN <= int(values.min()) <= int(values.max()) < shape.num_experts:
            raise TrajectoryError(f"column {COLUMN!r} has the expert {int(values.max())} of {shape.num_experts}")
        return values

    def replaying(self, values: Tensor) -> AbstractContextManager[None]:
        """Choose (b, L, layers, top_k) experts in the forward passes of the body, and again in its backward passes."""
        return self._running().forcing(values)

    def _running(self) -> RouteForcer:
        assert self._forcer is not None, "`prepare` comes first"
        return self._forcer

    @staticmethod
    def _shape(model: ModelSpec) -> RouteShape:
        shape = read_shape(model.path)
        if shape is None:
            raise ConfigError(
                "train.replays: router_replay needs a mixture of experts, and the config.json of"
                f" {str(model.path)!r} has no experts"
            )
        return shape
