"""The devices that a config names: whether this process has them."""

from __future__ import annotations

from typing import Final

from turnwise.errors import ConfigError

MOST_THREADS: Final = 4096
"""Most threads of torch in one process: far above any machine, and below what torch can count."""


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

    check_device_name(name, key)
    if name == "auto" or (device := torch.device(name)).type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        build = "torch is a CPU build" if torch.version.cuda is None else "no GPU is visible to this process"
        raise ConfigError(f"{key}: there is no {name}: {build}; use auto or cpu, or run nvidia-smi and turnwise doctor")
    if (device.index or 0) >= count:
        raise ConfigError(f"{key}: there is no {name}: this process has {count} GPUs, counted from 0")


def check_device_name(name: str, key: str) -> None:
    """Raise `ConfigError` if no machine has a device of torch with this name; arguments as in `check_device`."""
    import torch

    if name == "auto":
        return
    try:
        torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{key}: {name!r} is no device of torch; use auto, cpu, cuda or cuda:1") from None
