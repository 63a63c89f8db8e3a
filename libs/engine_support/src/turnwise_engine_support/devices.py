"""The devices that a config names: whether this process has them."""

from __future__ import annotations

from turnwise.errors import ConfigError


def check_device(name: str, key: str) -> None:
    """
    Check that this process has a device of torch, before anything is loaded onto it.

    Args:
        name: of the device, such as `cpu`, `cuda` or `cuda:1`; `auto` is always there.
        key: of the config, for the error.

    Raises:
        ConfigError: the name means no device, or this process does not have it.
    """
    import torch

    if name == "auto":
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{key}: {name!r} is no device of torch; use auto, cpu, cuda or cuda:1") from None
    if device.type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        build = "torch is a CPU build" if torch.version.cuda is None else "no GPU is visible to this process"
        raise ConfigError(f"{key}: there is no {name}: {build}; use auto or cpu, or run nvidia-smi and turnwise doctor")
    if (device.index or 0) >= count:
        raise ConfigError(f"{key}: there is no {name}: this process has {count} GPUs, counted from 0")
