"""Options of every group reward."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class GroupRewardConfig:
    """
    Options of every group reward. Those of a new one derive from it.

    Attributes:
        min_fraction: share of a group's episodes that must not have failed. If there are fewer, the others fail too,
            because a score among the few that are left would not compare with the scores of whole groups.
        deadline_s: seconds in which a group must be scored.
    """

    min_fraction: float = field(default=0.5, validator=[validators.ge(0), validators.le(1)])
    deadline_s: float = field(default=120.0, validator=validators.gt(0))
