"""Writes the files of a run without a model: a config, a data set, a tokenizer and `scripted_plugin`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.whole_runs.installation import write_distribution

PLUGIN: Final = "scripted_kit"
"""Name of the plugin in the section `plugins` of a config."""
SITE: Final = "site"


def write_scripted_run(folder: Path, *, num_tasks: int = 5, **sections: object) -> Path:
    """
    Write `run.yaml` with its tokenizer and tasks, and install the plugin to the folder `site`; return the config.

    The folder `site` must be on `sys.path`, or in `PYTHONPATH` for other processes (`environment_of`).

    Args:
        folder: of the config; it exists.
        num_tasks: rows of the data set; row i asks `Question i`.
        sections: sections of the config that replace the usual ones; `plugins` need not name those of the chat and
            of routers.
    """
    info = write_distribution(folder / SITE, PLUGIN.replace("_", "-"), "1.0")
    (info / "entry_points.txt").write_text(
        f"[turnwise]\n{PLUGIN} = turnwise_testing.whole_runs.scripted_plugin\n", encoding="utf-8"
    )
    byte_tokenizer().save_pretrained(folder / "model")
    rows = [{"messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(num_tasks)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config: Mapping[str, Any] = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl"},
        "engine": "scripted",
        "agent": "once",
        "reward": "length",
        "rollout": {"n": 2, "prompt_length": 64, "response_length": 64},
        "plugins": [PLUGIN],
    }
    config = {**config, **sections}
    if config["plugins"] is not None:
        # The model has a chat template, and a run on Ray has a router.
        config = {**config, "plugins": ["chat_templates", "routers", *config["plugins"]]}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of a process that finds the plugin of a folder, and the modules of this process."""
    path = os.pathsep.join(filter(None, [str(folder / SITE), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}
