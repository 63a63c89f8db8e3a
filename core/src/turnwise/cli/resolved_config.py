"""Reads a config as every command does: file, overrides, plugins, their options."""

from __future__ import annotations

from collections.abc import Iterable

from turnwise.config import RunConfig
from turnwise.config_file import load_config
from turnwise.errors import ConfigError
from turnwise.host import Host, resolve
from turnwise.runtime.assembly import host_of


def load_resolved(path: str, overrides: Iterable[str]) -> tuple[RunConfig, Host]:
    """Return a config whose plugin options are checked and filled in, and the host; errors name the file."""
    config = load_config(path, overrides)
    host = host_of(config)
    try:
        return resolve(config, host), host
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error
