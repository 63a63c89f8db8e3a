"""The diagnosis of the embedded engine."""

import subprocess
import sys

import pytest

from turnwise_transformers_engine import diagnosis


@pytest.fixture
def diagnose(monkeypatch):
    """A function that returns the findings for some version of torch and packages."""

    def run(torch, *, gpu=False, packages=()):
        versions = {"torch": torch, "transformers": "5.19.0"}

        def installed_version(name):
            return (name, versions[name]) if versions[name] else ("", "")

        for module in ("turnwise_engine_support.diagnosis", "turnwise_transformers_engine.diagnosis"):
            monkeypatch.setattr(f"{module}.has_gpu", lambda: gpu)
            monkeypatch.setattr(f"{module}.installed_version", installed_version)
        monkeypatch.setattr(diagnosis, "find_spec", lambda name: name if name in packages else None)
        return {found.item: found for found in diagnosis.diagnose()}

    return run


def test_a_missing_torch_comes_with_the_command(diagnose):
    """The plugin installs its own requirements."""
    found = diagnose("")["torch"]

    assert (found.state, found.hint) == ("missing", "pip install turnwise-transformers-engine")


def test_a_cpu_needs_nothing_else(diagnose):
    """Every item is fine on a machine without a GPU."""
    assert {"ok"} == {found.state for found in diagnose("2.13.0+cpu").values()}


def test_a_gpu_wants_its_torch_and_flash_attention(diagnose):
    """A CPU build of torch leaves the GPU unused."""
    cpu_build = diagnose("2.13.0+cpu", gpu=True)
    complete = diagnose("2.13.0+cu130", gpu=True, packages=("flash_attn",))

    assert ["limited", "limited"] == [cpu_build[item].state for item in ("device", "flash attention")]
    assert complete["device"].state == "ok"
    assert "flash attention" not in complete


def test_nothing_heavy_is_imported():
    """The diagnosis works in any interpreter, and for packages that cannot be imported."""
    code = (
        "import sys; from turnwise_transformers_engine.diagnosis import diagnose; print(len(diagnose()) > 3);"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)

    assert done.stdout.split("\n")[:2] == ["True", "[]"]
