"""Options of the group rewards."""

from __future__ import annotations

from attrs import field, frozen, validators

from turnwise_rollout_buffer import GroupRewardConfig


@frozen(kw_only=True)
class RelativeLengthConfig(GroupRewardConfig):
    """
    Options of the group reward `relative_length`.

    Attributes:
        weight: largest bonus is half of it, and largest penalty too.
        right_above: reward above which an episode counts as right.
    """

    weight: float = field(default=1.0, validator=validators.ge(0))
    right_above: float = 0.5
