"""The config of a training in its folder, so that later commands need nothing but the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from turnwise import RunConfig, load_config
from turnwise.config.file import dump_yaml, structure_config, to_dict, with_absolute_paths
from turnwise.errors import ConfigError
from turnwise.files import write_text

CONFIG_FILE: Final = "config.yaml"


def save_config(run: RunConfig, out: Path) -> None:
    """Write a resolved config to the folder of its training, with absolute paths."""
    write_text(out / CONFIG_FILE, dump_yaml(with_absolute_paths(run)))


def load_saved_config(out: Path) -> RunConfig:
    """Return the config of a training; `ConfigError` if the folder holds none."""
    if not (out / CONFIG_FILE).is_file():
        raise ConfigError(f"{out}: not the folder of a training: it has no {CONFIG_FILE}")
    return load_config(out / CONFIG_FILE)


def describe_config(run: RunConfig) -> str:
    """Return a config as YAML to publish: of absolute paths, only the last part is left."""
    return dump_yaml(structure_config(_without_folders(to_dict(run)), Path()))


def _without_folders(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name or value
    return value
