"""Runs the conformance file of a throw-away plugin."""

import sys

import pytest

from turnwise_testing.whole_runs.installation import install_plugin


class Outcomes(dict):
    """The outcome of each test, by name; a pytest plugin."""

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self[report.nodeid.rpartition("::test_")[2]] = report.outcome


@pytest.fixture
def run_conformance(tmp_path, monkeypatch):
    """A function that installs a plugin of one module, runs its conformance file, and returns the outcomes."""

    def run(module, plugin, conformance):
        install_plugin(tmp_path, module, plugin)
        (tmp_path / "test_conformance.py").write_text(conformance, encoding="utf-8")
        outcomes = Outcomes()
        options = ["-s", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={tmp_path}"]
        pytest.main([*options, str(tmp_path / "test_conformance.py")], plugins=[outcomes])
        return outcomes

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield run
    # Also the empty sglang of one test, which must not replace the real one in others.
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
