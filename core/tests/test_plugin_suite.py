"""What all conformance suites share: standard tests stand, and a plugin is found, light and registered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.testing.engine_checks import ENGINE_CHECKS
from turnwise.testing.engine_suite import EngineSuite
from turnwise.testing.suite import PluginSuite, overridden_tests


class Overriding(EngineSuite):
    def test_logprobs(self):
        """Replaced without a word."""

    test_ids_round_trip = None

    @pytest.mark.xfail(strict=True, reason="it has no greedy")
    def test_greedy_is_repeatable(self, checker):
        super().test_greedy_is_repeatable(checker)

    @pytest.mark.xfail(reason="not strict")
    def test_seed_is_repeatable(self, checker):
        super().test_seed_is_repeatable(checker)

    @pytest.mark.xfail(strict=True)
    def test_weight_versions(self, checker):
        super().test_weight_versions(checker)

    def test_of_its_own(self):
        """Added."""


def test_overridden_tests_are_found():
    """Removed, replaced, and excused without strict or a reason; a strict xfail with its reason and new tests pass."""
    expected = ["test_ids_round_trip", "test_logprobs", "test_seed_is_repeatable", "test_weight_versions"]

    assert overridden_tests(Overriding) == expected
    assert overridden_tests(EngineSuite) == []
    with pytest.raises(AssertionError):
        Overriding().test_no_standard_test_is_overridden()


def test_the_test_against_overriding_cannot_be_overridden():
    """It could not find itself, so the class statement fails."""
    with pytest.raises(TypeError, match="Sly must not override test_no_standard_test_is_overridden"):
        type("Sly", (PluginSuite,), {"test_no_standard_test_is_overridden": lambda self: None})


PLUGIN = """
import turnwise
from attrs import frozen
{heavy}

@frozen(kw_only=True)
class FakeConfig:
    vocab_size: int = 64

def make_fake(config, resources):
    from turnwise.testing.scripted import RandomPolicy, ScriptedEngine
    return ScriptedEngine(policy=RandomPolicy(vocab_size=config.vocab_size), token_latency_s=0.001)

@turnwise.hookimpl
def register_engines(registry):
    registry.add("fake", make_fake, config=FakeConfig)
"""

CONFORMANCE = """
import pytest
from turnwise.testing.engine_probe import EngineProbe
from turnwise.testing.engine_suite import EngineSuite

class TestFake(EngineSuite):
    entry_point = "fake_engine"
    module = "turnwise_fake_engine"
    registered = "fake"
    shared_engine = True

    @pytest.fixture
    def probe(self):
        return EngineProbe(vocab_size=64)
"""


def run_conformance(directory: Path, heavy: str = "") -> dict[str, str]:
    """Install a plugin in a directory, run its conformance file, and return the outcome of each test."""
    info = directory / "turnwise_fake_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: turnwise-fake-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turnwise]\nfake_engine = turnwise_fake_engine\n")
    (directory / "turnwise_fake_engine.py").write_text(PLUGIN.format(heavy=heavy))
    (directory / "ray.py").write_text("")
    (directory / "test_conformance.py").write_text(CONFORMANCE)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "test_conformance.py"]
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines() if "::test_" in line and "%]" in line]
    return {line[0].rpartition("::test_")[2]: line[1] for line in lines}


def test_a_plugin_runs_the_whole_suite(tmp_path):
    """Ten lines of conformance file: the standard tests run, share an engine, and skip what it cannot."""
    outcomes = run_conformance(tmp_path)

    skipped = {name for name, outcome in outcomes.items() if outcome == "SKIPPED"}
    assert skipped == {"too_long_context_is_refused", "output_stays_in_max_context"}
    assert {outcome for name, outcome in outcomes.items() if name not in skipped} == {"PASSED"}
    assert set(ENGINE_CHECKS) < set(outcomes)


def test_a_heavy_plugin_is_caught(tmp_path):
    """Importing ray, here an empty module of that name, at module level fails the one test about it."""
    outcomes = run_conformance(tmp_path, heavy="import ray")

    assert [name for name, outcome in outcomes.items() if outcome == "FAILED"] == ["import_is_light"]


def test_what_must_be_overridden_says_so():
    """The fixture names itself."""
    with pytest.raises(NotImplementedError, match="override the fixture 'probe'"):
        EngineSuite.probe.__wrapped__(EngineSuite())
