"""
Each YAML block of the pages and each config of `examples/` is planned on both runtimes, with all plugins installed.

A block is a whole config or sections of one; sections are put into a config that runs with a scripted engine. A block
that no machine of the tests can plan has its reason in `UNPLANNED`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from option_runs import BASE, command, write_config, write_site
from page_runner import Block, blocks, write

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

_PART = "the page writes the plugin of this part; tests/test_docs.py and tests/test_tutorial.py follow it"
_CODE = "the reader's own code"
_FILE = "the reader's own file"
_RAY = "its page says that it needs Ray"
_MODEL = "a model that is not installed"
_PYTHON = "a virtual environment that is not installed here"
_VERL = "verl, which is in no environment of these tests"
_TOOLS = "a file of verl that a config names, and no config"
_NO_FILE, _NO_PROGRAM = "No such file or directory", "is not an executable file"

_NO_VERL, _CLASSES = "runs a loop of verl, which is not installed here", "tools.0: an entry with class_name"

REFUSED: Final[dict[str, tuple[str, str]]] = {
    "docs/how-to/ask-a-judge.md#5": ("unknown reward 'second_opinion'", _PART),
    "docs/how-to/coming-from-verl.md#7": (_NO_VERL, _VERL),
    "docs/how-to/partial-rollouts.md#4": ("module 'my_tools.search' is not allowed; list it in modules", _CODE),
    "docs/how-to/use-a-model.md#0": ("HF_HUB_OFFLINE is set", "a model of the hub; tests/test_model_hub.py has a hub"),
    "docs/how-to/use-a-model.md#1": ("model.path: there is no file", _FILE),
    "docs/how-to/use-your-data.md#4": ("train.parquet: no such file", _FILE),
    "docs/how-to/use-your-data.md#5": ("math.parquet: no such file", _FILE),
    "docs/how-to/write-a-group-reward.md#4": ("unknown group reward 'majority'", _PART),
    "docs/how-to/write-a-reasoning-parser.md#5": ("unknown reasoning parser 'answer_tags'", _PART),
    "docs/how-to/write-a-reward.md#4": ("unknown reward 'brief_answer'", _PART),
    "docs/how-to/write-a-reward.md#5": (_NO_FILE, _CODE),
    "docs/how-to/write-a-router.md#4": ("unknown router 'group_home'", _PART),
    "docs/how-to/write-a-tool-parser.md#6": ("unknown tool parser 'react_lines'", _PART),
    "docs/how-to/write-a-weight-transport.md#4": ("unknown weight transport 'object_store'", _PART),
    "docs/how-to/write-an-adapter.md#5": (_NO_FILE, _CODE),
    "docs/tutorial/first-agent-plugin.md#4": ("unknown agent 'self_check'", _PART),
    "plugins/environments/README.md#1": ("cannot be imported: No module named 'verifiers'", "a package of others"),
    "plugins/mcp_tools/README.md#0": (_NO_FILE, _FILE),
    "plugins/verl_bridge/README.md#0": (_NO_VERL, _VERL),
    "plugins/verl_bridge/README.md#1": (_NO_FILE, _FILE),
    "plugins/vllm_engine/README.md#0 ray": (_NO_PROGRAM, _PYTHON),
    "examples/calculator_sglang.yaml ray": (_NO_PROGRAM, _PYTHON),
    "examples/calculator_vllm.yaml ray": (_NO_PROGRAM, _PYTHON),
    "examples/train_hybrid_vllm.yaml ray": (_NO_PROGRAM, _PYTHON),
    "examples/train_7b.yaml ray": (_NO_PROGRAM, _PYTHON),
    "examples/train_7b.yaml local": ("the runtime local has one", _RAY),
    "examples/from_verl/after/run.yaml": (_NO_VERL, _VERL),
    "examples/from_verl/after/tools.yaml": (_CLASSES, _TOOLS),
    "examples/from_verl/before/tools.yaml": (_CLASSES, _TOOLS),
    "examples/coding_cli/rollout.yaml": ("model.path: there is no directory", _MODEL),
}
"""The text of the refusal of a block or an example, on one runtime or on both, and its reason."""


def found_blocks() -> Iterator[tuple[str, tuple[dict[str, Any], list[Block]]]]:
    """Yield the place of each block with keys of a config, its content, and the files that its page writes."""
    for page in PAGES:
        files = [each for each in blocks(page) if each.file and each.language not in ("yaml", "yml")]
        for number, block in enumerate(blocks(page)):
            content = yaml.safe_load(block.text) if block.language in ("yaml", "yml") else None
            if isinstance(content, dict):
                yield f"{page.relative_to(ROOT).as_posix()}#{number}", (content, files)


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
        patch.syspath_prepend(str(made / "examples/external_openai"))  # as its README says
        patch.syspath_prepend(str(made))
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


def check(place: str, runtime: str, code: int, errors: str) -> None:
    """Check the outcome of a plan against `REFUSED`."""
    wanted = REFUSED.get(f"{place} {runtime}") or REFUSED.get(place)
    assert "Traceback" not in errors
    if wanted is None:
        assert (code, errors) == (0, "")
    else:
        assert code == 2
        assert errors.startswith("turnwise: error: ")
        file = "run.yaml" if "#" in place else Path(place).name
        assert all(file in line for line in errors.splitlines()[1:])  # one line for each misfit
        assert wanted[0] in errors


def config_of_block(place: str, runtime: str) -> dict[str, Any]:
    """Return a whole block as it is, and sections in a config that runs with a scripted engine."""
    block, files = BLOCKS[place]
    for each in files if "tutorial" not in place else ():
        write(each)
    if block.get("model", {}).get("path", "").startswith("/models/"):  # of the reader; a tokenizer is enough for a plan
        block = {**block, "model": {"path": "model"}}
    if {"data", "agent", "engine"} <= block.keys():
        return block
    base = {
        **BASE,
        "tools": [{"name": "calculator"}],
        "data": {"path": None if "sources" in block.get("data", {}) else "data.jsonl"},
    }
    config = merged(base, block)
    if runtime == "ray" and config.get("group_reward") and "runtime" not in block:
        return {**config, "runtime": {"reward_workers": 1}}  # docs/reference/config.md: it needs reward workers
    return config


@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize("place", BLOCKS)
def test_a_block_of_a_page_is_planned(place: str, runtime: str, folder: Path) -> None:
    """Or it is refused in one line, for a reason that a reader's machine has not."""
    code, errors = command("plan", write_config(folder, config_of_block(place, runtime)), f"runtime.name={runtime}")

    check(place, runtime, code, errors)


@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_an_example_is_planned(file: Path, runtime: str, folder: Path) -> None:
    """From a copy of the folder of examples."""
    code, errors = command("plan", str(folder / file.relative_to(ROOT)), f"runtime.name={runtime}")

    check(file.relative_to(ROOT).as_posix(), runtime, code, errors)
