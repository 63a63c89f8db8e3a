"""The benchmark, and the start from the source folders, on a machine without a GPU and with everything installed."""

import asyncio
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import from_source
import pytest
from gpu_support import Target

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_measures_on_a_cpu(tiny_model, monkeypatch):
    """Every row of the table has its figures, and the rows are those of engine, weights, sleep and attention."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks" / "gpu.py")
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    target = Target("cpu", small=True)
    rows = asyncio.run(gpu.measure_engine(target, tiny_model, rounds=1)) + gpu.measure_attention(target, rounds=1)

    names = " / ".join(row["measured"] for row in rows)
    for part in (
        "engine, requests at once: 1",
        "weight update",
        "sleep, level 2",
        "wake up, level 1",
        "dense",
        "segment",
    ):
        assert part in names
    assert all(0 < row["min"] <= row["median"] <= row["max"] for row in rows)
    table = gpu.as_markdown({"device": "cpu", "machine": "a machine", "rows": rows})
    assert len(table.splitlines()) == len(rows) + 4


def test_plugins_are_found_without_an_installation(tmp_path):
    """The written metadata name the entry points of every package of the repository."""
    from_source.write_metadata(tmp_path)

    found = {}
    for distribution in importlib.metadata.distributions(path=[str(tmp_path)]):
        points = distribution.entry_points.select(group="turnwise")
        found[distribution.name] = {point.name: point.value for point in points}
    expected = {info["name"]: info.get("entry-points", {}).get("turnwise", {}) for _, info in from_source.projects()}
    assert found == expected
    assert found["turnwise-calculator-demo"]


def test_missing_packages_are_named(tmp_path, monkeypatch):
    """Absent and outdated packages are listed, and the file to install them from."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# a comment\npytest>=8\nnumpy>=999.0\nno-such-package-here\n", encoding="utf-8")
    monkeypatch.setattr(from_source, "REQUIREMENTS", requirements)

    with pytest.raises(SystemExit) as caught:
        from_source.main()
    assert f"{sys.executable} lacks 2 packages" in str(caught.value)
    assert "numpy>=999.0 (there is " in str(caught.value)
    assert "install -r requirements.txt" in str(caught.value)


def test_the_requirements_fit_those_of_the_packages():
    """The launcher's file asks for no newer package than this environment has."""
    assert from_source.missing_requirements() == []
