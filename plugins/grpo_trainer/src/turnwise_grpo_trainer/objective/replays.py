"""
Replays: parts of a training that make the policy's forward passes follow what the engine did, token by token.

A replay reads an open column of all tokens, such as the experts that a router chose, and is active while the policy
computes log-probabilities and gradients. Reference and critic compute as they would without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import turnwise
from turnwise import Capabilities, Registry, Resources
from turnwise.protocols import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.config.own_code import OwnCode
    from turnwise.config.parts import Choice
    from turnwise.plugin.host import Host


@runtime_checkable
class Replay(Protocol):
    """
    Repeats in the policy's forward passes what the engine did.

    Attributes:
        column: name of an open column of all tokens with integers, which are negative for a token without a value.
    """

    column: str

    def check(self, model: ModelSpec) -> None:
        """Raise `ConfigError` if the model, on this machine, does not fit; called first, also by `--dry-run`."""

    def check_engine(self, engine: Capabilities, name: str) -> None:
        """Raise `ConfigError` if the engine of this name gives no values; called before the first episode."""

    def prepare(self, policy: Any, model: ModelSpec) -> None:
        """Take the loaded policy, on the host and not sharded; `ConfigError` if it cannot replay."""

    def read(self, values: Tensor) -> Tensor:
        """Check (N, *shape) values of a batch; `TrajectoryError` for one that the policy cannot have."""

    def replaying(self, values: Tensor) -> AbstractContextManager[None]:
        """
        Replay in the forward passes of the body, and in its backward passes, which may compute forward again.

        `values` are (b, L, *shape), of the b rows of L tokens that the policy gets; all of pads are -1.
        """


@turnwise.hookspec
def register_replays(registry: Registry[Replay]) -> None:
    """Add replays; see `Replay`."""


def build_replays(choices: Iterable[Choice], host: Host, code: OwnCode) -> tuple[Replay, ...]:
    """Build the replays of `train.replays`; `ConfigError` or `PluginError` for one that cannot be built."""
    from turnwise.config.resolve import build_part

    return tuple(
        build_part(host, "replays", choice, Resources(), path=f"train.replays.{index}", code=code)
        for index, choice in enumerate(choices)
    )
