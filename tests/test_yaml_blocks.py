"""
Each YAML block of the pages and each config of `examples/` is planned on both runtimes, with all plugins installed.

A block is a whole config or sections of one; sections are put into a config that runs with a scripted engine. A block
that no machine of the tests can plan has its reason in `UNPLANNED`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from option_runs import BASE, command, write_config, write_site
from page_runner import blocks

import turnwise.cli
import turnwise.config.resolve
from turnwise.plugin.host import load

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("libs/*/README.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
]
EXAMPLES = sorted(ROOT.glob("examples/**/*.yaml"))

_PLUGIN = "names a part that the page writes; tests/test_docs.py or tests/test_tutorial.py follow the page"
_MODEL = "the reader's own model"
_DATA = "the reader's own files"
_INTERPRETER = "the reader's own virtual environment"
UNPLANNED: dict[str, dict[str, str]] = {
    "the model directory": {"both": _MODEL},
    "there is no directory": {"both": _MODEL},
    "is not an executable file": {"ray": _INTERPRETER},
    "and the runtime local has one": {"local": "the page says that it needs Ray"},
    "with the runtime local": {"local": "the page says that it needs Ray"},
    "No such file or directory": {"both": _DATA},
    "does not exist": {"both": _DATA},
    "cannot import": {"both": _PLUGIN},
    "is not allowed; list it in modules": {"both": _PLUGIN},
    "unknown ": {"both": _PLUGIN},
    "no such": {"both": _PLUGIN},
}
"""Texts of refusals that a block may have, with the runtimes and the reason."""


def found_blocks() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the content of each block that has keys of a config."""
    for page in PAGES:
        for block in blocks(page):
            content = yaml.safe_load(block.text) if block.language in ("yaml", "yml") else None
            if isinstance(content, dict):
                yield f"{page.relative_to(ROOT).as_posix()}:{block.line}", content


BLOCKS = dict(found_blocks())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files that blocks name, and the examples."""
    made = tmp_path_factory.mktemp("blocks")
    site = write_site(made)
    shutil.copytree(ROOT / "examples", made / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.syspath_prepend(str(site))
        for name in ("ROLLOUT_KEY", "WIKI_PASSWORD", "SEARCH_KEY"):
            patch.setenv(name, "key-1")
        host = load()
        for module in (turnwise.cli, turnwise.config.resolve):  # it takes most of the time of a plan
            patch.setattr(module, "load", lambda recipe=None: host)
        yield made


def merged(base: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    """Return the base with the sections of a block in place of its own; sections without a `name` are joined."""
    both = dict(base)
    for key, value in block.items():
        joins = isinstance(value, dict) and isinstance(both.get(key), dict) and "name" not in value
        both[key] = {**both[key], **value} if joins else value
    return both


def allowed(error: str, runtime: str) -> bool:
    """Return whether a refusal has a reason."""
    return any(text in error and {runtime, "both"} & reasons.keys() for text, reasons in UNPLANNED.items())


@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize("place", BLOCKS)
def test_a_block_of_a_page_is_planned(place: str, runtime: str, folder: Path) -> None:
    """Or it is refused in one line, for a reason that a reader's machine has not."""
    base = {**BASE, "tools": [{"name": "calculator"}], "data": {"path": "data.jsonl"}}
    block = BLOCKS[place]
    config = block if {"data", "agent", "engine"} <= block.keys() else merged(base, block)
    if runtime == "ray" and config.get("group_reward") and "runtime" not in block:
        config = {**config, "runtime": {"reward_workers": 1}}  # docs/reference/config.md: it needs reward workers

    code, errors = command("plan", write_config(folder, config), f"runtime.name={runtime}")

    assert code in (0, 2), errors
    assert "Traceback" not in errors
    if code:
        assert all(allowed(line, runtime) for line in errors.splitlines()), errors


@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_an_example_is_planned(file: Path, runtime: str, folder: Path) -> None:
    """From a copy of the folder of examples."""
    code, errors = command("plan", str(folder / file.relative_to(ROOT)), f"runtime.name={runtime}")

    assert code in (0, 2), errors
    assert "Traceback" not in errors
    if code:
        assert all(allowed(line, runtime) for line in errors.splitlines()), errors
