"""
The matrix of options: each documented value of each key, and each plugin's part with its options.

All plugins of this repository are installed. Values that do not contradict each other share a config, and a config that
fails is cut in halves until the value is found. Every value is planned on both runtimes, and what a plan accepts is
rolled out on the runtime local. On Ray all values of the core's keys are rolled out, all parts, and a value of each of
their options.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from option_runs import (
    BASE,
    Entry,
    command,
    config_of,
    entries,
    entry_of,
    narrow,
    rounds,
    search,
    values_of,
    write_config,
    write_site,
)
from option_table import ELSEWHERE, INSTEAD, NEEDS, REFUSED, ROOT, VALUES
from option_walk import Key, keys_of_parts, keys_of_sections

import turnwise.cli
import turnwise.config.resolve
from turnwise.plugin.host import Host, load
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_result_files import read_results

RUNTIMES = ("local", "ray")
RAY_PARTS = 6
"""Tests of the rollouts on Ray, so that parts of the suite share them."""
TRAIN_BASE = {**BASE, "rollout": {**BASE["rollout"], "n": 2}, "train": {"num_steps": 1, "tasks_per_step": 1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files of the runs; the commands of this module find its plugin, and load the plugins once."""
    made = tmp_path_factory.mktemp("matrix")
    site = write_site(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.syspath_prepend(str(site))
        patch.setenv("MATRIX_KEY", "key-1")
        patch.setenv("MATRIX_SECRET", "s" * 40)
        patch.setenv("WANDB_MODE", "offline")
        host = load()
        for module in (turnwise.cli, turnwise.config.resolve):  # it takes most of the time of a plan
            patch.setattr(module, "load", lambda recipe=None: host)
        yield made


@pytest.fixture(scope="module")
def host(folder: Path) -> Host:
    """All installed plugins."""
    return load()


def all_keys(host: Host) -> list[Key]:
    """Return the keys of a run config, of every part and of the section `train`."""
    parts = [key for _kind, name, keys in keys_of_parts(host) if "matrix" not in name for key in keys]
    return [*keys_of_sections(), *parts, *keys_of_sections(TrainConfig, "train", ("train",))]


def is_of(entry: str, names: Sequence[str]) -> bool:
    """Return whether an entry is one of some values, keys or parts, or an option of one of these parts."""
    return any(entry == name or entry.startswith((f"{name}=", f"{name}.")) for name in names)


def refused_on(runtime: str) -> list[str]:
    return [name for name, (where, *_texts) in REFUSED.items() if where in (runtime, "both")]


def plan(folder: Path, runtime: str, members: Sequence[Entry]) -> str:
    """Plan a config; return the error, empty if there is none and nothing else was printed to standard error."""
    code, errors = command("plan", write_config(folder, config_of(members)), f"runtime.name={runtime}")
    return errors.strip() or ("" if code == 0 else f"exit code {code}")


def roll_out(folder: Path, runtime: str, members: Sequence[Entry]) -> str:
    """Roll out two tasks; return the error of the command or of an episode, empty if there is none."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    file = write_config(folder, config_of(members))
    code, errors = command("rollout", file, f"runtime.name={runtime}", "--out", str(out))
    if code != 0:
        return errors.strip() or f"exit code {code}"
    results = read_results(out)
    return next((str(each.fault) for each in results if each.fault), "" if results else "no episode")


def test_every_key_has_values(host: Host) -> None:
    """A new key is covered by its type, or has values in `option_table`; the tables name nothing else."""
    keys = {key.name: key for key in all_keys(host)}
    parts = {f"{kind}/{name}" for kind, name, _keys in keys_of_parts(host)}
    known = {*keys, *parts, *(part.partition("/")[0] for part in parts)}
    known |= {name[:end] for name in keys for end, letter in enumerate(name) if letter == "."}

    assert [name for name, key in keys.items() if not values_of(key)] == []
    assert [name for name in (*VALUES, *INSTEAD) if name not in keys] == []
    tables = (*NEEDS, *REFUSED, *ELSEWHERE)
    assert [name for name in tables if name.partition("=")[0] not in known] == []


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_each_value_is_planned(host: Host, folder: Path, runtime: str) -> None:
    """`turnwise plan` accepts every documented value, or it is in `REFUSED` with the reason."""
    found = [each for each in entries(host, on_ray=runtime == "ray") if not is_of(each.name, refused_on(runtime))]
    failed: dict[str, str] = {}
    for members in rounds(_of_runtime(found, runtime)):
        failed |= search(members, partial(plan, folder, runtime))

    assert failed == {}
    assert len(found) > 900


def _of_runtime(found: Sequence[Entry], runtime: str) -> list[Entry]:
    return [
        each for each in found if each.name not in {f"runtime.name={other}" for other in RUNTIMES if other != runtime}
    ]


@pytest.mark.many_cases(5)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused(host: Host, folder: Path, name: str) -> None:
    """In one line with the reason, and the reference page says so."""
    where, text, words = REFUSED[name]
    page = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")
    assert words in page
    for runtime in RUNTIMES:
        for entry in entries(host, on_ray=runtime == "ray"):
            if is_of(entry.name, [name]):
                error = plan(folder, runtime, [entry])
                assert bool(error) == (where in (runtime, "both")), (entry.name, runtime, error)
                assert not error or (error.startswith("turnwise: error: ") and text in error)
                assert len(error.splitlines()) <= 1


def test_values_beside_the_documented_ones_are_refused(host: Host, folder: Path) -> None:
    """A number below its bound, an unknown word or another type: a line that names the path, and no traceback."""
    parts = [
        (key, f"{kind}/{name}") for kind, name, keys in keys_of_parts(host) if "matrix" not in name for key in keys
    ]
    found = {
        (entry := entry_of(key, value, part)).name: (entry, key)
        for key, part in [*((key, "") for key in keys_of_sections()), *parts]
        for value in key.mismatches
    }
    silent = []
    for members in rounds([entry for entry, _key in found.values()]):
        code, errors = command("plan", write_config(folder, config_of(members)))
        assert code == 2
        assert "Traceback" not in errors
        lines = errors.splitlines()
        for member in members:
            last = str(found[member.name][1].path[-1])
            silent += [] if any(f"{last}:" in line for line in lines) else [member.name]

    assert silent == []
    assert len(found) >= 300


def test_each_value_of_train_is_planned(folder: Path) -> None:
    """`turnwise train --dry-run` accepts every documented value of the section `train`."""
    keys = keys_of_sections(TrainConfig, "train", ("train",))
    found = [entry_of(key, value) for key in keys for value in values_of(key)]

    def dry_run(members: Sequence[Entry]) -> str:
        code, errors = command("train", write_config(folder, config_of(members, TRAIN_BASE)), "--dry-run")
        return errors.strip() or ("" if code == 0 else f"exit code {code}")

    failed: dict[str, str] = {}
    for members in rounds(found):
        failed |= search(members, dry_run)

    assert failed == {}
    assert len(found) > 120


@pytest.mark.slow
def test_each_value_is_rolled_out_locally(host: Host, folder: Path) -> None:
    """Two tasks finish with every value that a plan accepts, unless `ELSEWHERE` has a reason."""
    left_out = [*refused_on("local"), *ELSEWHERE]
    found = _of_runtime([each for each in entries(host) if not is_of(each.name, left_out)], "local")
    failed: dict[str, str] = {}
    for members in rounds(found):
        failed |= search(members, partial(roll_out, folder, "local"))

    assert failed == {}
    assert len(found) > 600


@pytest.fixture(scope="module")
def ray_site(folder: Path, ray_head: str) -> Iterator[None]:
    """A connection to Ray whose actors find the plugin of the folder."""
    import ray
    from actor_coverage import make_runtime_env

    environment = make_runtime_env(folder / "site")
    environment["env_vars"] |= {"MATRIX_KEY": "key-1", "MATRIX_SECRET": "s" * 40, "WANDB_MODE": "offline"}
    ray.init(address=ray_head, namespace="turnwise", runtime_env=environment)
    yield
    ray.shutdown()


def for_ray(host: Host) -> list[Entry]:
    """Return every value of the core's keys, each part, and one value of each of its options."""
    found: list[Entry] = []
    seen: set[str] = set()
    for each in entries(host, on_ray=True):
        key = each.name.partition("=")[0]
        if "/" not in key or key not in seen:
            found.append(each)
        seen.add(key)
    left_out = [*refused_on("ray"), *ELSEWHERE]
    return _of_runtime([each for each in found if not is_of(each.name, left_out)], "ray")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_site")
@pytest.mark.parametrize("part", range(RAY_PARTS))
def test_each_value_is_rolled_out_on_ray(host: Host, folder: Path, part: int) -> None:
    """Two tasks finish on Ray, with a reward worker where a group reward needs one."""
    found = for_ray(host)
    joined = rounds(found)
    # A rollout starts five processes or more, and further values of options would need further configs.
    assert len(joined) <= 3 * RAY_PARTS
    assert len(found) > 500
    for members in joined[part::RAY_PARTS]:
        assert narrow(members, partial(roll_out, folder, "ray")) == {}
