"""
Each YAML block of the pages and each config of `examples/` is planned on both runtimes, with all plugins installed.

A block is a whole config or sections of one; sections are put into a config that runs with a scripted engine. A block
that no machine of the tests can plan has its reason in `REFUSED`. Two tasks of the others are rolled out on both
runtimes, with the scripted engine in place of theirs, unless `NOT_ROLLED_OUT` has a reason.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from option_runs import BASE, LISTS, Entry, command, config_of, narrow, rounds, write_config, write_site
from option_walk import patch
from page_runner import Block, blocks, write

import turnwise.cli
import turnwise.config.resolve
from turnwise.plugin.host import load
from turnwise_result_files import read_results

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("libs/*/README.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
]
KEYS: Final = ("ROLLOUT_KEY", "WIKI_PASSWORD", "SEARCH_KEY", "JUDGE_KEY")
PLAIN: Final = ("tools_file",)
"""Keys with a text that names no part."""
SIZES: Final = ("data", "rollout", "model", "train")
"""Sections of which one runtime is enough for each value: the matrix of options has the others."""
RAY_PARTS: Final = 6
"""Tests of the rollouts on Ray, so that parts of the suite share them."""
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
    "docs/how-to/wrap-a-part.md#4": ("limits: unknown key", _PART),
    "docs/how-to/write-a-group-reward.md#4": ("unknown group reward 'majority'", _PART),
    "docs/how-to/write-a-reasoning-parser.md#5": ("unknown reasoning parser 'answer_tags'", _PART),
    "docs/how-to/write-a-reward.md#4": ("unknown reward 'brief_answer'", _PART),
    "docs/how-to/write-a-reward.md#5": (_NO_FILE, _CODE),
    "docs/how-to/write-a-router.md#4": ("unknown router 'group_home'", _PART),
    "docs/how-to/write-a-tool-parser.md#6": ("unknown tool parser 'react_lines'", _PART),
    "docs/how-to/write-a-weight-transport.md#4": ("unknown weight transport 'object_store'", _PART),
    "docs/how-to/write-an-adapter.md#5": (_NO_FILE, _CODE),
    "docs/how-to/write-a-task-source.md#4": ("unknown task source 'countdowns'", _PART),
    "docs/how-to/write-a-task-source.md#5": ("unknown task source 'countdowns'", _PART),
    "docs/tutorial/your-own-agent.md#3": ("there is no", _FILE),
    "docs/tutorial/first-agent-plugin.md#4": ("unknown agent 'self_check'", _PART),
    "plugins/environments/README.md#1": ("cannot be imported: No module named 'verifiers'", "a package of others"),
    "plugins/gateway/README.md#1": ("mounts: /opt/agent: there is no", _FILE),
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
    "examples/real_single_turn.yaml": ("model.path: there is no file", _MODEL),
    "examples/bfcl.yaml": ("model.path: there is no file", _MODEL),
    "examples/real_tools.yaml": ("model.path: there is no file", _MODEL),
    "examples/real_tool_sums.yaml": ("model.path: there is no file", _MODEL),
    "examples/train_real.yaml": ("model.path: there is no file", _MODEL),
}
"""The text of the refusal of a block or an example, on one runtime or on both, and its reason."""


_PROGRAM: Final = "needs a program: plugins/gateway/tests and tests/test_external_agents.py have some"
_LEASE: Final = "needs agents that lease the episodes: tests/test_external_pull_example.py"
_TRAIN: Final = "a training: tests/test_train_examples.py; its other sections are few"
_TEACHER: Final = "a training: tests/test_distillation.py; its other sections are few"
_REPLAY: Final = "needs a mixture of experts: tests/test_router_replay.py"
_PICTURES: Final = "its tasks have pictures, and the scripted engine takes none: tests/test_drawn_scenes.py"
_IMAGES: Final = "needs images of containers: plugins/workspace_tasks/tests/test_in_containers.py makes some"
_LABELS: Final = "needs nodes with these labels: tests/test_ray_nodes.py"
_STORE: Final = "needs an account and a store; the plugin's own tests run it"
_GPU: Final = "needs GPUs"
_WORDS: Final = "its prompts are too long for a tokenizer of bytes: plugins/bfcl/tests/test_multi_turn.py"

NOT_ROLLED_OUT: Final[dict[str, str]] = {
    "docs/explanation/ray.md#0 ray": _LABELS,
    "docs/how-to/train-a-coding-agent.md#3": _IMAGES,
    "docs/how-to/train.md#0": _TRAIN,
    "docs/how-to/train.md#1": _TRAIN,
    "docs/how-to/train.md#2": _TRAIN,
    "docs/how-to/train.md#3": _STORE,
    **dict.fromkeys((f"docs/how-to/distill-a-teacher.md#{number}" for number in range(1, 5)), _TEACHER),
    "docs/how-to/write-a-loss.md#6": _TRAIN,
    "docs/tutorial/your-own-agent.md#0": _PROGRAM,
    "plugins/bfcl/README.md#1": _WORDS,
    "plugins/distillation/README.md#0": _TEACHER,
    "plugins/experiment_trackers/README.md#0": _STORE,
    "plugins/gateway/README.md#0": _PROGRAM,
    "plugins/gateway/README.md#1": _FILE,
    "plugins/gateway/README.md#2": _PROGRAM,
    "plugins/router_replay/README.md#0": _REPLAY,
    "plugins/task_pool/README.md#0": _LEASE,
    "plugins/task_pool/README.md#3": _LEASE,
    "examples/coding_cli/rollout.yaml": _MODEL,
    "examples/external_openai/rollout.yaml": _PROGRAM,
    "examples/external_pull/rollout.yaml": _LEASE,
    "examples/train_7b.yaml": _GPU,
    "examples/train_scenes.yaml": _PICTURES,
}
"""Blocks and examples that are planned but not rolled out, with the reason; a runtime's name limits it to that one."""


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
    with pytest.MonkeyPatch.context() as monkey:
        monkey.chdir(made)
        monkey.syspath_prepend(str(site))
        monkey.syspath_prepend(str(made / "examples/external_openai"))  # as its README says
        monkey.syspath_prepend(str(made))
        for name in KEYS:
            monkey.setenv(name, "key-1")
        host = load()
        for module in (turnwise.cli, turnwise.config.resolve):  # it takes most of the time of a plan
            monkey.setattr(module, "load", lambda recipe=None: host)
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
        assert all(file in line for line in errors.splitlines()[1:])  # one line for each mismatch
        assert wanted[0] in errors


def planned(places: Iterable[str]) -> Iterator[object]:
    """
    Yield the places with each runtime.

    A plan on Ray without a section `runtime` is slow: each value of an option is planned on Ray by the matrix, and the
    runtime local plans this place with the same parts.
    """
    for place in places:
        content = BLOCKS[place][0] if place in BLOCKS else yaml.safe_load((ROOT / place).read_text(encoding="utf-8"))
        first = [pytest.mark.slow] if place.startswith("plugins/reasoning_gym/") else []  # its package takes seconds
        yield pytest.param(place, "local", id=f"{place}-local", marks=first)
        marks = [] if "runtime" in content or f"{place} ray" in REFUSED else [pytest.mark.slow]
        yield pytest.param(place, "ray", id=f"{place}-ray", marks=marks)


def config_of_block(place: str, runtime: str) -> dict[str, Any]:
    """Return a whole block as it is, and sections in a config that runs with a scripted engine."""
    block, files = BLOCKS[place]
    for each in files if "tutorial" not in place else ():
        write(each)
    path = block.get("model", {}).get("path", "")
    if path.startswith(("/models/", "~/")):  # of the reader; a tokenizer is enough for a plan
        block = {**block, "model": {"path": "gpt_oss" if "gpt-oss" in path else "model"}}
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


@pytest.mark.parametrize(("place", "runtime"), list(planned(BLOCKS)))
def test_a_block_of_a_page_is_planned(place: str, runtime: str, folder: Path) -> None:
    """Or it is refused in one line, for a reason that a reader's machine has not."""
    code, errors = command("plan", write_config(folder, config_of_block(place, runtime)), f"runtime.name={runtime}")

    check(place, runtime, code, errors)


@pytest.mark.parametrize(("place", "runtime"), list(planned(file.relative_to(ROOT).as_posix() for file in EXAMPLES)))
def test_an_example_is_planned(place: str, runtime: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a copy of the folder of examples, without the models that its user has fetched."""
    monkeypatch.setenv("HOME", str(folder))
    code, errors = command("plan", str(folder / place), f"runtime.name={runtime}")

    check(place, runtime, code, errors)


def is_rolled_out(place: str, runtime: str) -> bool:
    """Return whether a block or an example is rolled out on a runtime."""
    names = (place, f"{place} {runtime}")
    # A missing interpreter of an engine is no obstacle: the scripted engine needs none.
    refusals = [REFUSED[name][1] for name in names if name in REFUSED]
    return not any(name in NOT_ROLLED_OUT for name in names) and refusals in ([], [_PYTHON])


def config_of_place(place: str, runtime: str) -> dict[str, Any]:
    """Return the config of a block or an example as plan reads it."""
    if place in BLOCKS:
        return config_of_block(place, runtime)
    return dict(yaml.safe_load((ROOT / place).read_text(encoding="utf-8")))


def scripted(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config for a short run of two tasks with the scripted engine."""
    config = {**config, "engine": {"name": "matrix"}}
    if "judge" in config:
        config["judge"] = {**config["judge"], "engine": {"name": "matrix"}}
    if "sources" not in config["data"]:
        config["data"] = {**config["data"], "limit": 2}
    rollout = config.get("rollout", {})
    config["rollout"] = {**rollout, "n": min(rollout.get("n", 1), 2)}
    if isinstance(config.get("observers"), list):  # another run may have the port
        config["observers"] = [
            {**each, "port": 0} if isinstance(each, dict) and "port" in each else each for each in config["observers"]
        ]
    if isinstance(config.get("runtime"), dict) and "ray" in config["runtime"]:
        options = {name: value for name, value in config["runtime"]["ray"].items() if name != "replica_python"}
        config["runtime"] = {**config["runtime"], "ray": options}
    return config


def roll_out(folder: Path, config: dict[str, Any], runtime: str, beside: str = "") -> str:
    """Roll out a config that is written beside a file; return the error of the command or of an episode, or nothing."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    file = write_config((folder / beside).parent if beside else folder, scripted(config))
    code, errors = command("rollout", file, f"runtime.name={runtime}", "--out", str(out))
    if code != 0:
        return errors.strip() or f"exit code {code}"
    results = read_results(out)
    return next((str(each.fault) for each in results if each.fault), "" if results else "no episode")


PLACES: Final = (*BLOCKS, *(file.relative_to(ROOT).as_posix() for file in EXAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("place", [each for each in PLACES if is_rolled_out(each, "local")])
def test_it_is_rolled_out_locally(place: str, folder: Path) -> None:
    """Two tasks finish."""
    assert roll_out(folder, config_of_place(place, "local"), "local", "" if place in BLOCKS else place) == ""


def entry_of_block(place: str) -> Entry:
    """Return the sections of a block, and the files of its page, as an entry that others may join."""
    changes: dict[Any, Any] = {}
    content, files = BLOCKS[place]
    for name, value in content.items():
        if name in LISTS:
            for item in value:
                options = dict(item) if isinstance(item, dict) else {"name": item}
                part = options.pop("name")
                changes |= patch((name, part), options)
                if name == "tools":  # two tools of one name contradict each other
                    changes |= {("shown", each): part for each in options.get("tools", [part])}
        elif name != "engine":
            changes |= patch((name,), {"name": value} if isinstance(value, str) and name not in PLAIN else value)
    changes |= {("files", each.file): each.text for each in files}
    if "group_reward" in content:
        changes[("runtime", "reward_workers")] = 1  # docs/reference/config.md: it needs reward workers
    path = changes.get(("model", "path"), "")
    if path.startswith("/models/"):
        changes[("model", "path")] = "gpt_oss" if "gpt-oss" in path else "model"
    return Entry(place, changes)


def roll_out_joined(folder: Path, members: Sequence[Entry]) -> str:
    """Roll out blocks in one config on Ray, beside the files of their pages."""
    for place in (each.name for each in members):
        for file in BLOCKS[place][1]:
            write(file)
    only = [
        Entry(each.name, {path: value for path, value in each.changes.items() if path[0] not in ("files", "shown")})
        for each in members
    ]
    return roll_out(folder, config_of(only), "ray")


def configs_for_ray() -> tuple[list[list[Entry]], dict[str, list[str]]]:
    """
    Return the runs on Ray: sections in joins, and whole configs.

    Several whole configs may differ only in data and sizes. Then the first one runs, and the others are listed with it.
    """
    places = [each for each in PLACES if is_rolled_out(each, "ray")]
    alike: dict[str, list[str]] = {}
    for place in places:
        if place not in BLOCKS or {"data", "agent", "engine"} <= BLOCKS[place][0].keys():
            content = BLOCKS[place][0] if place in BLOCKS else config_of_place(place, "ray")
            leaves = {name: value for name, value in scripted(content).items() if name not in SIZES}
            alike.setdefault(repr(sorted(leaves.items())), []).append(place)
    whole = {shared[0]: shared for shared in alike.values()}
    known = {place for shared in whole.values() for place in shared}
    return rounds(entry_of_block(each) for each in places if each not in known), whole


@pytest.fixture(scope="module")
def ray_site(folder: Path, ray_head: str) -> Iterator[None]:
    """A connection to Ray whose actors find what the commands of this module find."""
    import ray
    from actor_coverage import make_runtime_env

    environment = make_runtime_env(folder / "site")
    paths = [str(folder), str(folder / "examples/external_openai"), environment["env_vars"]["PYTHONPATH"]]
    environment["env_vars"] |= {"PYTHONPATH": os.pathsep.join(paths)} | dict.fromkeys(KEYS, "key-1")
    ray.init(address=ray_head, namespace="turnwise", runtime_env=environment)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_site")
@pytest.mark.parametrize("part", range(RAY_PARTS))
def test_they_are_rolled_out_on_ray(part: int, folder: Path) -> None:
    """Two tasks finish in each run; sections that do not contradict each other share one."""
    joined, whole = configs_for_ray()
    failed: dict[str, str] = {}
    for run in [*joined, *whole][part::RAY_PARTS]:
        if isinstance(run, list):
            failed |= narrow(run, partial(roll_out_joined, folder))
        elif error := roll_out(folder, config_of_place(run, "ray"), "ray", "" if run in BLOCKS else run):
            failed[run] = error

    assert failed == {}


def test_most_are_rolled_out() -> None:
    """The tables name existing blocks, and few of them are left out."""
    places = {*PLACES}
    assert [name for name in (*REFUSED, *NOT_ROLLED_OUT) if name.split()[0] not in places] == []
    assert sum(is_rolled_out(each, "local") for each in PLACES) >= 45
    joined, whole = configs_for_ray()
    assert sum(map(len, (*joined, *whole.values()))) >= 45
