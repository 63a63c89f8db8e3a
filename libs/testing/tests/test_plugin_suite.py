"""Tests of the conformance suites: nobody overrides a standard test, and a plugin is found, light and registered."""

import subprocess
import sys

import pytest

import turnwise_testing
from turnwise.plugin.host import load
from turnwise.types import PluginRecipe
from turnwise_testing.checks.engine.run import ENGINE_CHECKS
from turnwise_testing.checks.parser import PARSER_CHECKS
from turnwise_testing.checks.part import KINDS, checks_of
from turnwise_testing.suites import parts
from turnwise_testing.suites.engine import MEDIA_TESTS, EngineSuite
from turnwise_testing.suites.plugin import PluginSuite, overridden_tests


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


class Seeing(EngineSuite):
    media_only = True

    def test_logprobs(self):
        """Replaced without a word."""


def test_a_suite_of_media_has_the_tests_of_pictures():
    """And a few of text. Leaving the others to another class is no override, and replacing one of them is."""
    kept = {name for name in dir(Seeing) if name.startswith("test_") and getattr(Seeing, name) is not None}

    assert {f"test_{name}" for name, check in ENGINE_CHECKS.items() if check.pictures} < MEDIA_TESTS
    assert MEDIA_TESTS <= {name for name in dir(EngineSuite) if name.startswith("test_")}
    assert kept == MEDIA_TESTS | {"test_logprobs"}
    assert overridden_tests(Seeing) == ["test_logprobs"]
    assert EngineSuite.test_seed_is_repeatable is not None


def test_the_test_against_overriding_cannot_be_overridden():
    """It could not find itself, so the class statement fails."""
    with pytest.raises(TypeError, match="Sly must not override test_no_standard_test_is_overridden"):
        type("Sly", (PluginSuite,), {"test_no_standard_test_is_overridden": lambda self: None})


def test_every_kind_has_one_suite_with_a_test_of_each_check():
    """Those of the table, by a subclass that only sets the kind; engines and tool parsers have suites of their own."""
    suites = {
        suite.kind: suite for name, suite in vars(parts).items() if name.endswith("Suite") and "kind" in vars(suite)
    }

    assert suites.keys() == KINDS.keys()
    # A replay needs the model that it changes, so its plugin tests it in trainings.
    assert set(load(PluginRecipe()).kinds) == {*KINDS, "engines", "tool_parsers", "replays"}
    for kind, suite in [*suites.items(), ("tool_parsers", turnwise_testing.ToolParserSuite)]:
        type("Own", (suite,), {})
        checks = PARSER_CHECKS if kind == "tool_parsers" else checks_of(kind).checks
        assert {name for name in vars(suite) if name.startswith("test_")} == {f"test_{name}" for name in checks}
        assert suite.hook == f"register_{kind}"


def test_the_checks_of_a_kind_are_imported_with_its_first_suite():
    """A test of a router imports no checks that need torch."""
    made = "type('Own', (RouterSuite,), {})"
    code = f"import sys; from turnwise_testing import RouterSuite; {made}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_the_stub_names_what_the_kit_has():
    """Each public name can be imported, and others are refused."""
    for name in turnwise_testing.__all__:
        assert getattr(turnwise_testing, name)
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        turnwise_testing.Missing  # noqa: B018 - the access is the test


PLUGIN = """
import turnwise
from attrs import frozen
{heavy}

@frozen(kw_only=True)
class FakeConfig:
    vocab_size: int = 64

def make_fake(config, resources):
    from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine
    return ScriptedEngine(policy=RandomPolicy(vocab_size=config.vocab_size), token_latency_s=0.001)

@turnwise.hookimpl
def register_engines(registry):
    registry.add("fake", make_fake, config=FakeConfig)
"""

CONFORMANCE = """
import pytest
from turnwise_testing.probes.engine import EngineProbe
from turnwise_testing.suites.engine import MEDIA_TESTS, EngineSuite

class TestFake(EngineSuite):
    entry_point = "turnwise_fake_engine"
    module = "turnwise_fake_engine"
    registered = "fake"
    shared_engine = True

    @pytest.fixture
    def probe(self):
        return EngineProbe(vocab_size=64)
"""


@pytest.fixture
def run_engine_suite(run_conformance):
    """A function that installs the plugin of an engine, runs its conformance file, and returns the outcomes."""
    return lambda heavy="": run_conformance("turnwise_fake_engine", PLUGIN.format(heavy=heavy), CONFORMANCE)


@pytest.mark.slow
def test_a_plugin_runs_the_whole_suite(run_engine_suite):
    """Ten lines of conformance file: the standard tests run, share an engine, and skip what it cannot."""
    outcomes = run_engine_suite()

    # The forms of a check under delays are skipped with the check itself.
    delayed = {name for name, outcome in outcomes.items() if outcome == "skipped" and "holds_under_delays" in name}
    skipped = {name for name, outcome in outcomes.items() if outcome == "skipped"} - delayed
    references = {name for name, check in ENGINE_CHECKS.items() if check.reference}
    lacking = {name for name, check in ENGINE_CHECKS.items() if check.needs in ("layouts", "grammars", "pictures")}
    assert skipped == {"too_long_context_is_refused", "output_stays_in_max_context", *references, *lacking}
    assert {outcome for name, outcome in outcomes.items() if name not in skipped | delayed} == {"passed"}
    assert set(ENGINE_CHECKS) < set(outcomes)


@pytest.mark.slow
def test_a_heavy_plugin_is_caught(run_engine_suite, tmp_path):
    """Importing sglang, here an empty module of that name, at module level fails the one test about it."""
    (tmp_path / "sglang.py").write_text("")

    outcomes = run_engine_suite(heavy="import sglang")

    assert [name for name, outcome in outcomes.items() if outcome == "failed"] == ["import_is_light"]


def test_what_must_be_overridden_says_so():
    """The fixture names itself."""
    with pytest.raises(NotImplementedError, match="override the fixture 'probe'"):
        EngineSuite.probe.__wrapped__(EngineSuite())
