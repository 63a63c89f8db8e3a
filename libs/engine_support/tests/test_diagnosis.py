"""Findings about packages and the machine, without importing a package."""

import pytest

from turnwise import Finding
from turnwise_engine_support import diagnosis, machine
from turnwise_engine_support.diagnosis import (
    avx512_finding,
    cpu_platform_finding,
    device_finding,
    package_finding,
    release,
    shared_memory_finding,
)
from turnwise_testing.whole_runs.installation import write_distribution


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that makes a distribution look installed."""

    def put(name, version):
        write_distribution(tmp_path, name, version)
        monkeypatch.syspath_prepend(tmp_path)

    return put


@pytest.mark.parametrize(
    ("version", "state", "text"),
    [
        ("", "missing", "turnwise-no-such or turnwise-nor-this is not installed here"),
        ("1.9.9", "missing", "turnwise-nor-this 1.9.9 is older than 2.0, the oldest that works"),
        ("2.1.0", "ok", "turnwise-nor-this 2.1.0 is installed, the version that the tests ran with"),
        ("2.1.0+cpu", "ok", "turnwise-nor-this 2.1.0+cpu is installed, the version that the tests ran with"),
        ("2.2", "limited", "turnwise-nor-this 2.2 is installed; the tests ran with 2.1.0"),
        ("3.0", "missing", "turnwise-nor-this 3.0 is too new: the engine needs a version below 3"),
    ],
)
def test_versions_of_packages(install, version, state, text):
    """Too old and too new are as good as missing, and an untested version is said to be one."""
    if version:
        install("turnwise-nor-this", version)

    found = package_finding(
        "turnwise-no-such", "turnwise-nor-this", tested="2.1.0", oldest="2.0", below="3", hint="pip install it"
    )

    assert found == Finding("turnwise-no-such", state, text, "" if state == "ok" else "pip install it")


@pytest.mark.parametrize(
    ("text", "expected"), [("0.32.0", (0, 32, 0)), ("0.5.23.post1", (0, 5, 23)), ("2.13rc1", (2, 13)), ("x", ())]
)
def test_release_numbers(text, expected):
    """Suffixes do not count."""
    assert expected == release(text)


@pytest.mark.parametrize(
    ("visible", "driver", "expected"),
    [("0", "/proc/self", True), ("", "/proc/self", False), ("-1", "/proc/self", False), ("0", "/no such", False)],
)
def test_hidden_gpus_are_not_used(monkeypatch, visible, driver, expected):
    """Ray gives an actor without GPUs an empty list of them."""
    monkeypatch.setattr(machine, "_DRIVERS", (driver,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert expected is machine.has_gpu()


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("flags\t\t: fpu avx2 avx512f\n", ["ok", "ok"]),
        ("flags\t\t: fpu avx2\n", ["missing", "limited"]),
        (None, ["missing", "limited"]),
    ],
)
def test_avx512(monkeypatch, tmp_path, text, states):
    """Without it an engine is slow, or does not run at all; unknown counts as absent."""
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(machine, "_CPU_INFO", path)

    assert states == [avx512_finding(required=required, effect="it is slow").state for required in (True, False)]


@pytest.mark.parametrize(
    ("sizes", "state", "hint"),
    [(None, "limited", "enlarge it"), ((64 << 20, 32 << 20), "limited", "enlarge it"), ((8 << 30, 4 << 30), "ok", "")],
)
def test_shared_memory(monkeypatch, sizes, state, hint):
    """Containers get 64 MiB unless told otherwise."""
    monkeypatch.setattr(diagnosis, "shared_memory", lambda: sizes)

    found = shared_memory_finding(use="new weights", hint="enlarge it")

    assert (state, hint) == (found.state, found.hint)
    assert "new weights" in found.explanation


@pytest.mark.parametrize(
    ("build", "gpu", "expected"),
    [
        ("cuda", True, ("ok", "")),
        ("cuda", False, ("missing", "install cpu")),
        ("cpu", True, ("limited", "install cuda")),
        ("cpu", False, ("ok", "")),
        ("", False, ("ok", "")),
    ],
)
def test_the_build_must_fit_the_device(monkeypatch, build, gpu, expected):
    """A build for GPUs needs one; a CPU build leaves one unused."""
    monkeypatch.setattr(diagnosis, "has_gpu", lambda: gpu)

    found = device_finding(build, gpu_remedy="install cuda", cpu_remedy="install cpu")

    assert expected == (found.state, found.hint)


@pytest.mark.parametrize(
    ("linux", "libc", "state"), [(True, "2.36", "ok"), (True, "2.31", "missing"), (False, "2.36", "missing")]
)
def test_cpu_builds_have_platforms(monkeypatch, linux, libc, state):
    """The CPU builds are for Linux on x86-64, and SGLang's needs a recent glibc."""
    monkeypatch.setattr(diagnosis, "is_linux_x86", lambda: linux)
    monkeypatch.setattr(diagnosis.platform, "libc_ver", lambda: ("glibc", libc))

    assert state == cpu_platform_finding(glibc="2.34").state


def test_this_machine_can_be_asked():
    """The real probes answer without raising."""
    assert isinstance(machine.has_gpu(), bool)
    assert isinstance(machine.is_linux_x86(), bool)
    sizes = machine.shared_memory()
    assert sizes is None or sizes[0] >= sizes[1] >= 0
