"""Options of the sandbox and the tool: defaults, limits, and errors that name the option."""

from __future__ import annotations

import os

import pytest

from turnwise_python_sandbox import PythonToolConfig, SandboxConfig, Tier, config


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("memory_mb", 15),
        ("max_output_bytes", -1),
        ("cpu_s", 0),
        ("disk_mb", 0),
        ("max_files", 0),
        ("max_threads", 15),
        ("servers", 0),
        ("max_in_flight", 0),
        ("max_sessions", 0),
        ("session_idle_s", 0),
    ],
)
def test_a_value_out_of_range_is_refused(option: str, value: float) -> None:
    """The error names the option and has the value."""
    with pytest.raises(ValueError, match=rf"'{option}' must be .*{value}"):
        SandboxConfig(**{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [("memory_mb", 16), ("max_output_bytes", 0), ("disk_mb", 1), ("max_threads", 16), ("cpu_s", None), ("servers", 1)],
)
def test_the_smallest_value_is_allowed(option: str, value: int | None) -> None:
    """Each limit includes its bound; no output at all is a legal limit."""
    assert getattr(SandboxConfig(**{option: value}), option) == value


def test_a_tier_is_given_by_its_number() -> None:
    """Config files have numbers; a number without a tier is refused."""
    assert SandboxConfig(tier=2).tier is Tier.LANDLOCK
    assert SandboxConfig().tier is None
    with pytest.raises(ValueError, match="'tier' must be one of 0, 1, 2, 3, 5: 4"):
        SandboxConfig(tier=4)


def test_lists_of_a_config_file_make_no_difference() -> None:
    """Equal options are equal and hash equally, as the shared sandbox and the cached self-test need."""
    from_file = SandboxConfig(preload=["numpy"], readable=["/data"], tier=1)
    in_code = SandboxConfig(preload=("numpy",), readable=("/data",), tier=Tier.NAMESPACES)

    assert from_file == in_code
    assert hash(from_file) == hash(in_code)


def test_defaults_depend_on_the_cores(monkeypatch) -> None:
    """One server and two programs per core, unless the options say otherwise."""
    monkeypatch.setattr(config, "count_cores", lambda: 6)

    assert (6, 12) == (SandboxConfig().num_servers, SandboxConfig().capacity)
    assert (3, 4) == (SandboxConfig(servers=3).num_servers, SandboxConfig(max_in_flight=4).capacity)


def test_only_usable_cores_count(monkeypatch) -> None:
    """A process that is pinned to two cores of many starts two servers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 7})

    assert config.count_cores() == 2


def test_systems_without_affinity_count_all_cores(monkeypatch) -> None:
    """On macOS every core counts, and an unknown number is one core."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert config.count_cores() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)

    assert config.count_cores() == 1


def test_the_observation_has_a_least_length() -> None:
    """Fewer than 64 characters would not hold the reason of a stop."""
    with pytest.raises(ValueError, match="'max_chars' must be >= 64: 63"):
        PythonToolConfig(max_chars=63)
