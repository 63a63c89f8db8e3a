"""The conformance suite of engines: `turnwise.testing.engine_checks`, one test each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from turnwise.protocols import Engine, Resources
from turnwise.testing.engine_checks import EngineChecker, MakeEngine
from turnwise.testing.engine_probe import EngineProbe
from turnwise.testing.suite import PluginSuite


class EngineSuite(PluginSuite):
    """
    What every engine must pass. A plugin's whole file::

        class TestAcme(EngineSuite):
            entry_point = "acme_engine"
            module = "turnwise_acme_engine"
            registered = "acme"

            @pytest.fixture
            def probe(self):
                return EngineProbe(vocab_size=512)

            @pytest.fixture
            def config(self, tmp_path):
                return AcmeConfig(model=tiny_model(tmp_path))

    Must be overridden: the fixture `probe`. May be: `config`, `resources`, and `make_engine`, which calls the
    registered factory with them.

    Attributes:
        shared_engine: let the tests that want a running engine share one; for engines that start slowly. The fixtures
            of the first test then count.
    """

    hook = "register_engines"
    shared_engine: ClassVar[bool] = False

    @pytest.fixture
    def probe(self) -> EngineProbe:
        """What to ask; must be overridden."""
        raise NotImplementedError("override the fixture 'probe' with an EngineProbe of the model's vocabulary")

    @pytest.fixture
    def make_engine(self, config: object, resources: Resources) -> MakeEngine:
        """A maker of engines that were not started; may be overridden."""
        factory = self.entry().factory
        return lambda: factory(config, resources)

    @pytest.fixture(scope="class")
    @classmethod
    def checkers(cls) -> Iterator[list[EngineChecker]]:
        """Holds the checker that the tests share; not to be overridden."""
        kept: list[EngineChecker] = []
        yield kept
        for checker in kept:
            checker.close()

    @pytest.fixture
    def checker(
        self, make_engine: MakeEngine, probe: EngineProbe, checkers: list[EngineChecker]
    ) -> Iterator[EngineChecker]:
        """Runs the checks; not to be overridden."""
        if not self.shared_engine:
            with EngineChecker(make_engine, probe) as alone:
                yield alone
            return
        if not checkers:
            checkers.append(EngineChecker(make_engine, probe, shared=True))
        yield checkers[0]

    def test_fulfils_the_protocol(self, make_engine: MakeEngine) -> None:
        """The factory returns something with all methods of an engine."""
        assert isinstance(make_engine(), Engine)

    def test_ids_round_trip(self, checker: EngineChecker) -> None:
        """Ids come back as int32 within the vocabulary, one log-probability slot each; the context is left alone."""
        run(checker, "ids_round_trip")

    def test_length_ends_a_turn(self, checker: EngineChecker) -> None:
        """Without stop ids exactly `max_tokens` tokens come, and the reason is `length`."""
        run(checker, "length_ends_a_turn")

    def test_stop_id_ends_a_turn(self, checker: EngineChecker) -> None:
        """A stop id ends the turn, stays in the output and is named. It is one that the model samples anyway."""
        run(checker, "stop_id_ends_a_turn")

    def test_logprobs(self, checker: EngineChecker) -> None:
        """Log-probabilities are float32, finite, at most 0, and one per id, at several temperatures."""
        run(checker, "logprobs")

    def test_concurrent_requests_keep_identity(self, checker: EngineChecker) -> None:
        """Of many requests at once each gets its own answer: its own length, and as a rule what it gets alone."""
        run(checker, "concurrent_requests_keep_identity")

    def test_greedy_is_repeatable(self, checker: EngineChecker) -> None:
        """Temperature 0 gives the same ids each time."""
        run(checker, "greedy_is_repeatable")

    def test_seed_is_repeatable(self, checker: EngineChecker) -> None:
        """The same seed gives the same ids, whatever runs beside it; other seeds give others."""
        run(checker, "seed_is_repeatable")

    def test_abort_returns_what_was_sampled(self, checker: EngineChecker) -> None:
        """An aborted request ends at once with a beginning of what it would have sampled, and frees its slot."""
        run(checker, "abort_returns_what_was_sampled")

    def test_abort_of_unknown_is_ignored(self, checker: EngineChecker) -> None:
        """Aborting an id that is unknown, or has ended, does nothing."""
        run(checker, "abort_of_unknown_is_ignored")

    def test_cancelling_frees_the_slot(self, checker: EngineChecker) -> None:
        """A cancelled `generate` leaves nothing running, and its id can be used again."""
        run(checker, "cancelling_frees_the_slot")

    def test_serves_when_idle(self, checker: EngineChecker) -> None:
        """Nothing runs once all requests have ended, and a new one is served."""
        run(checker, "serves_when_idle")

    def test_stats_count_what_runs(self, checker: EngineChecker) -> None:
        """`num_running` rises to the number of requests in flight and falls back to 0."""
        run(checker, "stats_count_what_runs")

    def test_empty_context_is_refused(self, checker: EngineChecker) -> None:
        """A request without a context raises `EngineError`, and the engine lives on."""
        run(checker, "empty_context_is_refused")

    def test_too_long_context_is_refused(self, checker: EngineChecker) -> None:
        """A context of more than `max_context` tokens raises `EngineError`, and the engine lives on."""
        run(checker, "too_long_context_is_refused")

    def test_output_stays_in_max_context(self, checker: EngineChecker) -> None:
        """Context and output together never pass `max_context`: the output is cut, with `length`."""
        run(checker, "output_stays_in_max_context")

    def test_weight_versions(self, checker: EngineChecker) -> None:
        """A result's weight version is an integer from 0, or one for each id."""
        run(checker, "weight_versions")

    def test_weight_update_changes_the_version(self, checker: EngineChecker) -> None:
        """After `update_weights` results carry the new version."""
        run(checker, "weight_update_changes_the_version")

    def test_sleep_and_wake_up(self, checker: EngineChecker) -> None:
        """Level 1, if there is one, refuses requests until it is woken; twice is once; the weights are as before."""
        run(checker, "sleep_and_wake_up")

    def test_generate_before_start_is_refused(self, checker: EngineChecker) -> None:
        """A request to an engine that was not started raises `EngineError`, and it can be stopped."""
        run(checker, "generate_before_start_is_refused")

    def test_start_keeps_the_capabilities(self, checker: EngineChecker) -> None:
        """Capabilities are the same before and after `start`."""
        run(checker, "start_keeps_the_capabilities")

    def test_stop_twice_is_harmless(self, checker: EngineChecker) -> None:
        """`stop` may be called again, and a request after it raises `EngineError`."""
        run(checker, "stop_twice_is_harmless")

    def test_stop_ends_what_is_in_flight(self, checker: EngineChecker) -> None:
        """Requests in flight end with `abort` when the engine is stopped; none hangs."""
        run(checker, "stop_ends_what_is_in_flight")


def run(checker: EngineChecker, name: str) -> None:
    """Run one check in a test; skip it, and say why, when the engine lacks the capability."""
    if missing := checker.run(name):
        pytest.skip(missing)
