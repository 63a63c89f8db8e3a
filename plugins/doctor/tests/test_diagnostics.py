"""The diagnostics of turnwise, Ray and the machine."""

import pytest

from turnwise_doctor import core_diagnostics, machine_diagnostic
from turnwise_doctor.core_diagnostics import RayDiagnostic, TurnwiseDiagnostic
from turnwise_doctor.machine_diagnostic import MachineDiagnostic


def test_turnwise_names_missing_extras(monkeypatch):
    """Without torch there are no batches as tensors, and the hint installs the extra."""
    monkeypatch.setattr(core_diagnostics, "installed_version", lambda name: "" if name == "torch" else "1.0")

    found = {finding.item: finding for finding in TurnwiseDiagnostic().diagnose()}

    assert {"Python", "turnwise", "plugins", "engines"} < found.keys()
    assert ("limited", "pip install 'turnwise[torch]'") == (found["torch"].state, found["torch"].hint)
    assert "ok" == found["transformers"].state


@pytest.mark.parametrize(
    ("environment", "has_file", "state", "text"),
    [
        ({}, False, "ok", "Ray creates one"),
        ({}, True, "ok", "a token is present"),
        ({"RAY_AUTH_TOKEN": "secret"}, False, "ok", "a token is present"),
        ({"RAY_AUTH_MODE": "token"}, False, "limited", "has no token"),
        ({"RAY_AUTH_MODE": "token"}, True, "ok", "a token is present"),
        ({"RAY_AUTH_MODE": "disabled"}, True, "limited", "can run code"),
    ],
)
def test_ray_token(monkeypatch, tmp_path, environment, has_file, state, text):
    """The token comes from the environment or from the file; without authentication a cluster is open."""
    monkeypatch.setattr(core_diagnostics, "installed_version", lambda name: "2.60.0")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "auth_token"
    if has_file:
        path.write_text("secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))

    ray, token = RayDiagnostic().diagnose()

    assert ("ok", state) == (ray.state, token.state)
    assert text in token.explanation
    assert "secret" not in token.explanation


def test_without_ray(monkeypatch):
    """The hint installs the extra."""
    monkeypatch.setattr(core_diagnostics, "installed_version", lambda name: "")

    (ray,) = RayDiagnostic().diagnose()

    assert ("missing", "pip install 'turnwise[ray]'") == (ray.state, ray.hint)


# The machine


@pytest.mark.parametrize(
    ("script", "state", "text"),
    [
        (None, "limited", "nvidia-smi is not installed"),
        ("echo 'NVIDIA H200, 143771 MiB'; echo 'NVIDIA H200, 143771 MiB'", "ok", "2 x NVIDIA H200, 143771 MiB"),
        ("echo 'No devices were found'; exit 6", "broken", "No devices were found"),
        ("echo 'no driver' >&2; exit 9", "broken", "no driver"),
    ],
)
def test_gpus(monkeypatch, make_program, script, state, text):
    """Equal GPUs are counted; a driver that does not work is broken."""
    found = None if script is None else make_program("nvidia-smi", script)
    monkeypatch.setattr(machine_diagnostic.shutil, "which", lambda name: found)

    finding = machine_diagnostic.gpu_finding()

    assert state == finding.state
    assert text in finding.explanation


@pytest.mark.parametrize(
    ("script", "has_gpu", "state", "text"),
    [
        ("""echo '{"version": "2.13.0", "names": ["H200"]}'""", True, "ok", "can use 1 GPU"),
        ("""echo '{"version": "2.13.0+cpu", "names": []}'""", True, "limited", "cannot use the GPU"),
        ("""echo '{"version": "2.13.0+cpu", "names": []}'""", False, "ok", "runs on the CPU"),
        ("echo 'ImportError: libcudart' >&2; exit 1", True, "broken", "ImportError: libcudart"),
    ],
)
def test_torch(monkeypatch, make_program, script, has_gpu, state, text):
    """Torch runs in a separate process, so that a build that crashes is a finding."""
    monkeypatch.setattr(machine_diagnostic.sys, "executable", make_program("python", script))

    finding = machine_diagnostic.torch_finding(has_gpu=has_gpu)

    assert state == finding.state
    assert text in finding.explanation


def test_machine_without_torch(monkeypatch):
    """Cores, memory and shared memory are reported; torch is not started if it is not installed."""
    monkeypatch.setattr(machine_diagnostic, "installed_version", lambda name: "")
    monkeypatch.setattr(machine_diagnostic, "torch_finding", lambda has_gpu: pytest.fail("asked torch"))

    assert ["GPU", "CPU", "memory", "shared memory", "open files"] == [
        each.item for each in MachineDiagnostic().diagnose()
    ]


def test_limits_of_a_container(monkeypatch, tmp_path):
    """Cores and memory follow the quota of the container."""
    for name, value in {"cpu.max": "50000 100000", "memory.max": str(4 << 30), "memory.current": str(3 << 30)}.items():
        (tmp_path / name).write_text(value + "\n")
    monkeypatch.setattr(machine_diagnostic, "_CGROUP", tmp_path)

    memory = machine_diagnostic.memory_finding()

    assert 0.5 == machine_diagnostic.count_cores()
    assert "limited" == memory.state
    assert "1.0 of 4.0 GiB are available" in memory.explanation


@pytest.mark.parametrize(("limit", "state"), [(1024, "limited"), (4096, "ok")])
def test_few_open_files(monkeypatch, limit, state):
    """A limit that the programs of a worker's agents may reach is a finding with the number that they need."""
    monkeypatch.setattr(machine_diagnostic, "raise_descriptor_limit", lambda: limit)

    finding = machine_diagnostic.open_files_finding()

    assert finding.state == state
    assert f"{limit:,}" in finding.explanation
    assert ("1,792: 128 of them fit" in finding.explanation) == (state == "limited")


def test_a_machine_without_shared_memory(monkeypatch, tmp_path):
    """The hint is the container's option."""
    monkeypatch.setattr(machine_diagnostic, "_SHARED_MEMORY", tmp_path / "shm")

    finding = machine_diagnostic.shared_memory_finding()

    assert "limited" == finding.state
    assert "--shm-size" in finding.hint
