"""All values of the runtime's keys either plan a run or are refused in a line."""

import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turnwise.config.file import structure_config
from turnwise.config.runtime import MOST_PROCESSES
from turnwise.errors import ConfigError
from turnwise.runtime.placement import check_interpreters, plan_placement

SECTIONS = ("runtime.ray.replica_resources", "runtime.ray.worker_resources", "judge.pool.replica_resources")
PYTHONS = ("runtime.ray.replica_python", "judge.pool.replica_python")
COUNTS = (
    "runtime.num_workers",
    "runtime.num_replicas",
    "runtime.total_devices",
    "runtime.reward_workers",
    "runtime.ray.max_replicas",
    "judge.pool.num_replicas",
    "judge.pool.total_devices",
)
SIZES = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
NUMBERS = st.integers() | st.floats() | st.booleans() | st.sampled_from([0.5, 1e300, 1e14, 10**400, 2**63])
PLAIN = st.none() | NUMBERS | st.text(max_size=3) | st.lists(NUMBERS, max_size=2)
VALUES = PLAIN | st.dictionaries(st.text(max_size=3) | st.integers(), PLAIN, max_size=2)


def config(**values):
    """Return a config whose values are given by their dotted paths."""
    data = {
        "data": {"path": "tasks.jsonl"},
        "agent": "single_turn",
        "reward": "exact",
        "engine": {"name": "scripted"},
        "judge": {"engine": {"name": "scripted"}},
        "runtime": {"name": "ray"},
    }
    for path, value in values.items():
        *sections, key = path.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return structure_config(data, Path("/"))


def needs_of(**values):
    """Return the resources that a run needs, or None if a value is refused in a line without a Python error."""
    try:
        placement = plan_placement(config(**values))
        check_interpreters(placement)
    except ConfigError as error:
        refusal = str(error)
    else:
        return placement.needs
    assert any(path.rpartition(".")[2] in refusal for path in values), refusal
    return None


@pytest.mark.parametrize("section", SECTIONS)
@given(name=st.sampled_from(["num_cpus", "num_gpus", "memory", "resources", "labels"]), value=VALUES)
@example(name="num_gpus", value="x")
@example(name="num_gpus", value=-1)
@example(name="num_gpus", value=1e300)
@example(name="num_cpus", value=None)
@example(name="num_cpus", value=True)
@example(name="num_cpus", value=1e-5)
@example(name="memory", value="1 GiB")
@example(name="memory", value=math.nan)
@example(name="resources", value=5)
@example(name="resources", value={"room": "x"})
@example(name="resources", value={"CPU": 1})
@example(name="labels", value="x")
@example(name="labels", value={"zone": 1})
def test_a_resource_is_a_number_that_ray_can_count(section, name, value):
    """A plan reserves finite numbers above 0, and at most as many as Ray counts."""
    needs = needs_of(**{section: {name: value}})

    assert needs is None or all(0 < amount < 1e15 and math.isfinite(amount) for amount in needs.values())
    if name in ("num_cpus", "num_gpus", "memory"):
        is_number = type(value) in (int, float) and (value == 0 or 1e-4 <= value <= 1e14)
        assert needs is None or is_number
    elif needs is not None:
        assert isinstance(value, dict)
        assert all(isinstance(key, str) for key in value)
        assert name != "labels" or all(isinstance(each, str) for each in value.values())


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    "asked",
    [
        {"num_cpus": 2, "memory": 1 << 40},
        {"num_cpus": 0.5},
        {"resources": {"room": 1}},
        {"labels": {"zone": "in(x)"}},
        {},
    ],
    ids=str,
)
def test_resources_in_rays_forms_are_taken(section, asked):
    """The forms that the documentation shows make a plan."""
    assert needs_of(**{section: asked}) is not None


@pytest.mark.parametrize("path", PYTHONS)
@pytest.mark.parametrize("python", ["", " ", "\t\n", "no-such-python", "/", "/nowhere/python", "a b"])
def test_an_interpreter_that_is_none_is_refused(path, python):
    """A blank name is refused as an unknown one is."""
    assert needs_of(**{path: python}) is None


@pytest.mark.parametrize("path", COUNTS)
@pytest.mark.parametrize("number", [MOST_PROCESSES + 1, 10**8, 2**63 - 1, 2**63, 10**30])
def test_a_run_has_a_bounded_number_of_processes(path, number):
    """A number that no cluster has is refused before anything is counted up to it."""
    assert needs_of(**{path: number}) is None


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_local_run_has_a_bounded_number_of_workers_too(runtime):
    """The bound holds for both runtimes, and itself is allowed."""
    with pytest.raises(ConfigError, match=f"num_workers: must be <= {MOST_PROCESSES}"):
        config(**{"runtime.name": runtime, "runtime.num_workers": 10**8})
    assert MOST_PROCESSES == config(**{"runtime.num_workers": MOST_PROCESSES}).runtime.num_workers


@pytest.mark.parametrize("engine", ["engine", "judge.engine"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [0, -1, 10**8, 2**63, "x", 1.5, True, [2]])
def test_a_parallel_size_is_a_number_of_devices(engine, size, value):
    """The plan reads these options before the engine's plugin does."""
    assert needs_of(**{f"{engine}.name": "vllm", f"{engine}.{size}": value}) is None


@pytest.mark.parametrize("engine", ["engine", "judge.engine"])
def test_the_devices_of_a_replica_are_bounded(engine):
    """Sizes that are possible one by one are refused together."""
    sizes = {f"{engine}.{size}": 1000 for size in SIZES}
    assert needs_of(**{f"{engine}.name": "vllm", **sizes}) is None
