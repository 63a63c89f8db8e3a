"""The diagnosis of the SGLang engine: a CPU and a GPU need different things."""

import subprocess
import sys

import pytest

from turnwise_sglang_engine import diagnosis


@pytest.fixture
def installed(monkeypatch):
    """A function that returns the findings with some version of SGLang and some packages installed."""

    def put(version="", *, gpu, packages=()):
        monkeypatch.setattr(diagnosis, "has_gpu", lambda: gpu)
        monkeypatch.setattr(diagnosis, "find_spec", lambda name: name if name in packages else None)
        names = ("sglang", version) if version else ("", "")
        monkeypatch.setattr("turnwise_engine_support.diagnosis.installed_version", lambda *_: names)
        return {found.item: found for found in diagnosis.diagnose()}

    return put


@pytest.mark.parametrize(
    ("gpu", "hint"), [(True, "pip install 'turnwise-sglang-engine[cuda]'"), (False, "follow the section 'Install'")]
)
def test_a_missing_sglang_comes_with_the_fitting_command(installed, gpu, hint):
    """A CPU needs several pip commands, so the hint is the README."""
    found = installed(gpu=gpu)["sglang"]

    assert (found.state, found.hint.startswith(hint)) == ("missing", True)


def test_a_cpu_has_more_needs_and_no_sleep(installed):
    """AVX-512, platform and packages matter only on a CPU."""
    on_cpu = installed("0.5.23", gpu=False)
    on_gpu = installed("0.5.23", gpu=True, packages=("torch_memory_saver",))

    assert {
        "sglang",
        "device",
        "packages",
        "platform",
        "AVX-512",
        "shared memory",
        "sleep",
        "weight updates",
    } == on_cpu.keys()
    assert {"sglang", "device", "shared memory", "sleep", "weight updates"} == on_gpu.keys()
    assert ("limited", "ok") == (on_cpu["sleep"].state, on_gpu["sleep"].state)
    assert "packages" not in installed("0.5.23", gpu=False, packages=("torch", "transformers"))


def test_sleep_on_a_gpu_needs_a_package(installed):
    """SGLang frees memory through torch_memory_saver."""
    found = installed("0.5.23", gpu=True)["sleep"]

    assert (found.state, found.hint) == ("limited", "pip install torch_memory_saver")


@pytest.mark.parametrize(
    ("version", "state"), [("0.5.22", "missing"), ("0.5.23", "ok"), ("0.5.24", "limited"), ("0.6.0", "missing")]
)
def test_versions(installed, version, state):
    """An untested version is limited, one out of range is as good as missing."""
    assert state == installed(version, gpu=True)["sglang"].state


def test_nothing_heavy_is_imported():
    """The diagnosis works in any interpreter, and for an SGLang that cannot be imported."""
    code = (
        "import sys; from turnwise_sglang_engine.diagnosis import diagnose; print(len(diagnose()) > 3);"
        "print([name for name in ('torch', 'sglang', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)

    assert done.stdout.split("\n")[:2] == ["True", "[]"]
