"""Options of the registered losses and advantages; without torch, because the hook imports them."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class ClipConfig:
    """
    Bounds of the probability ratio.

    Attributes:
        clip_ratio_low: the ratio is clipped below 1 minus this.
        clip_ratio_high: the ratio is clipped above 1 plus this.
    """

    clip_ratio_low: float = field(default=0.2, validator=[validators.gt(0), validators.le(1)])
    clip_ratio_high: float = field(default=0.2, validator=validators.gt(0))


@frozen(kw_only=True)
class DualClipConfig(ClipConfig):
    """
    Bounds of PPO with a dual clip.

    Attributes:
        clip_ratio_c: the loss of a token with a negative advantage is at most this times the advantage's size.
    """

    clip_ratio_c: float = field(default=3.0, validator=validators.gt(1))


@frozen(kw_only=True)
class GspoConfig(ClipConfig):
    """Bounds of the ratio of a whole row, with the defaults of the paper (section 5.1)."""

    clip_ratio_low: float = field(default=3e-4, validator=[validators.gt(0), validators.le(1)])
    clip_ratio_high: float = field(default=4e-4, validator=validators.gt(0))


@frozen(kw_only=True)
class CispoConfig(ClipConfig):
    """Bounds of the importance weight; a low bound of 1 is none, as in the paper."""

    clip_ratio_low: float = field(default=1.0, validator=[validators.gt(0), validators.le(1)])
    clip_ratio_high: float = field(default=0.28, validator=validators.gt(0))


@frozen(kw_only=True)
class PathCreditConfig:
    """
    Options of `path_credit`.

    Attributes:
        norm_adv_by_std: divide the reward minus the group's mean by the group's standard deviation, as `grpo` does.
        ratio_cap: largest probability ratio of the episode's rest without a path; bounds the variance.
    """

    norm_adv_by_std: bool = True
    ratio_cap: float = field(default=2.0, validator=validators.ge(1))
