"""The conformance suite of engines: `turnwise_testing.checks.engine.run`, one test each."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import ClassVar

import pytest
from attrs import evolve

from turnwise.protocols import Engine, Resources
from turnwise_testing.checks.engine.delays import DELAYS, NO_DELAYS, Delays
from turnwise_testing.checks.engine.run import ENGINE_CHECKS, EngineChecker, MakeEngine
from turnwise_testing.engines.actor_run import ActorJob
from turnwise_testing.probes.engine import EngineProbe
from turnwise_testing.suites.plugin import PluginSuite

DELAYED_CHECKS = (
    "abort_returns_what_was_sampled",
    "cancelling_frees_the_slot",
    "weight_update_changes_the_version",
    "weight_update_changes_the_output",
    "no_stale_prefix_after_an_update",
    "updates_under_load",
    "requests_around_an_update",
    "failed_update_changes_nothing",
    "cancelled_update_serves_one_version",
    "sleep_and_wake_up",
    "sleep_ends_what_is_in_flight",
    "level_2_serves_what_it_is_given",
    "cancelled_sleep_keeps_the_weights",
    "cancelled_level_2_never_serves_lost_weights",
)
"""Checks that run under delays too."""
MEDIA_TESTS = frozenset(f"test_{name}" for name, check in ENGINE_CHECKS.items() if check.pictures) | {
    "test_fulfils_the_protocol",
    "test_ids_round_trip",
    "test_logprobs_are_those_of_the_model",
    "test_no_standard_test_is_overridden",
    "test_weight_update_changes_the_output",
}
"""Tests of a suite with `media_only`: all about pictures, and a few about text."""


class EngineSuite(PluginSuite):
    """
    The conformance suite of engines. A plugin's whole file::

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
        logprob_bound: largest difference to the log-probabilities of the probe's reference, in nats; None leaves it to
            the probe.
        media_only: run the tests of pictures and a few of text alone; for a model that sees, beside a suite that runs
            all tests of the same engine with a model of text.
    """

    hook = "register_engines"
    shared_engine: ClassVar[bool] = False
    logprob_bound: ClassVar[float | None] = None
    media_only: ClassVar[bool] = False

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if cls.media_only:
            standard = {name for name in dir(EngineSuite) if name.startswith("test_")}
            cls.left_out = frozenset(standard - MEDIA_TESTS - vars(cls).keys())
            for name in cls.left_out:
                setattr(cls, name, None)  # pytest collects no such attribute, and none of the same name of a base

    @pytest.fixture
    def probe(self) -> EngineProbe:
        """The probe of the engine; must be overridden."""
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
        if self.logprob_bound is not None:
            probe = evolve(probe, logprob_bound=self.logprob_bound)
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

    def test_is_built_in_a_ray_actor(self, config: object, resources: Resources, probe: EngineProbe) -> None:
        """Config and resources cross a process border, and an actor of Ray builds, starts, asks and stops an engine."""
        made = next(vars(kind)["make_engine"] for kind in type(self).__mro__ if "make_engine" in vars(kind))
        if made is not vars(EngineSuite)["make_engine"]:
            pytest.skip("this suite makes its engines itself, and those cannot cross a process border")
        job = ActorJob(
            entry_point=self.entry_point,
            module=self.module,
            hook=self.hook,
            registered=self.registered,
            config=config,
            resources=resources,
            request=probe.request(),
        )

        assert in_an_actor(job) == (len(job.request.token_ids), job.request.sampling.max_tokens)

    def test_ids_round_trip(self, checker: EngineChecker) -> None:
        """Ids come back as int32 within the vocabulary, one log-probability slot each; the context is left alone."""
        run(checker, "ids_round_trip")

    def test_length_ends_a_turn(self, checker: EngineChecker) -> None:
        """Without stop ids exactly `max_tokens` tokens come, and the reason is `length`."""
        run(checker, "length_ends_a_turn")

    def test_listener_hears_a_prefix(self, checker: EngineChecker) -> None:
        """The ids that a listener of a request hears, if any, are the first ones of the result, in order."""
        run(checker, "listener_hears_a_prefix")

    def test_stop_id_ends_a_turn(self, checker: EngineChecker) -> None:
        """A stop id ends the turn, stays in the output and is named. It is one that the model samples anyway."""
        run(checker, "stop_id_ends_a_turn")

    def test_logprobs(self, checker: EngineChecker) -> None:
        """Log-probabilities are float32, finite, at most 0, and one per id, at several temperatures."""
        run(checker, "logprobs")

    def test_concurrent_requests_keep_identity(self, checker: EngineChecker) -> None:
        """Of many requests at once each gets its own result: its own length, and as a rule the same tokens as alone."""
        run(checker, "concurrent_requests_keep_identity")

    def test_greedy_is_repeatable(self, checker: EngineChecker) -> None:
        """Temperature 0 gives the same ids each time."""
        run(checker, "greedy_is_repeatable")

    def test_seed_is_repeatable(self, checker: EngineChecker) -> None:
        """The same seed gives the same ids, whatever runs beside it; other seeds give others."""
        run(checker, "seed_is_repeatable")

    def test_abort_returns_what_was_sampled(self, checker: EngineChecker) -> None:
        """An aborted request ends at once with a prefix of its tokens, and frees its slot."""
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

    def test_logprobs_are_those_of_the_model(self, checker: EngineChecker) -> None:
        """Log-probabilities belong to the sampled distribution, as a float32 forward pass computes it."""
        run(checker, "logprobs_are_those_of_the_model")

    def test_weight_update_changes_the_output(self, checker: EngineChecker) -> None:
        """After an update greedy output is exactly the new weights' output; a second update restores the old one."""
        run(checker, "weight_update_changes_the_output")

    def test_no_stale_prefix_after_an_update(self, checker: EngineChecker) -> None:
        """A context that was cached under the old weights is read again under the new ones."""
        run(checker, "no_stale_prefix_after_an_update")

    def test_update_in_flight_marks_each_token(self, checker: EngineChecker) -> None:
        """An update in mid-flight: each token is greedy under the weights of the version that it claims."""
        run(checker, "update_in_flight_marks_each_token")

    def test_updates_under_load(self, checker: EngineChecker) -> None:
        """Update after update while requests run: every token comes from the weights of the version it claims."""
        run(checker, "updates_under_load")

    def test_failed_update_changes_nothing(self, checker: EngineChecker) -> None:
        """A wrong name or shape, or a source that breaks off, leaves the old version, or none, serving."""
        run(checker, "failed_update_changes_nothing")

    def test_generate_while_asleep_says_so(self, checker: EngineChecker) -> None:
        """The error of a request to a sleeping engine says "asleep", also between the two stages of waking up."""
        run(checker, "generate_while_asleep_says_so")

    def test_wrong_sleep_calls_are_refused(self, checker: EngineChecker) -> None:
        """An unknown level or tag, and weights into memory that sleeps, raise `EngineError`; the engine lives on."""
        run(checker, "wrong_sleep_calls_are_refused")

    def test_sleep_ends_what_is_in_flight(self, checker: EngineChecker) -> None:
        """Requests in flight end with `abort` and their tokens when the engine goes to sleep; none hangs."""
        run(checker, "sleep_ends_what_is_in_flight")

    def test_level_2_serves_what_it_is_given(self, checker: EngineChecker) -> None:
        """After level 2 the engine serves the weights of an update between the two stages of waking up."""
        run(checker, "level_2_serves_what_it_is_given")

    def test_sleep_and_wake_up(self, checker: EngineChecker) -> None:
        """Level 1 refuses requests until it is woken; twice is once; the weights are as before."""
        run(checker, "sleep_and_wake_up")

    def test_requests_around_an_update(self, checker: EngineChecker) -> None:
        """Requests that arrive before, in and after an update: each token comes from the weights that it claims."""
        run(checker, "requests_around_an_update")

    def test_cancelled_update_serves_one_version(self, checker: EngineChecker) -> None:
        """A cancelled update changes all weights or none, or makes the engine refuse requests; it never lands later."""
        run(checker, "cancelled_update_serves_one_version")

    def test_cancelled_sleep_keeps_the_weights(self, checker: EngineChecker) -> None:
        """After a cancelled sleep or wake-up the engine answers correctly, or is asleep and wakes up."""
        run(checker, "cancelled_sleep_keeps_the_weights")

    def test_cancelled_level_2_never_serves_lost_weights(self, checker: EngineChecker) -> None:
        """After a cancelled sleep at level 2 it answers correctly or refuses, until an update brings the weights."""
        run(checker, "cancelled_level_2_never_serves_lost_weights")

    @pytest.mark.parametrize("delays", DELAYS)
    @pytest.mark.parametrize("name", DELAYED_CHECKS)
    def test_holds_under_delays(self, checker: EngineChecker, name: str, delays: str) -> None:
        """The checks of weights, versions, sleep and aborts also hold if hand-overs take long."""
        run(checker, name, DELAYS[delays])

    def test_layout_without_paths_is_plain_text(self, checker: EngineChecker) -> None:
        """A layout with no paths changes nothing."""
        run(checker, "layout_without_paths_is_plain_text")

    def test_order_of_paths_does_not_matter(self, checker: EngineChecker) -> None:
        """Paths share positions and do not see each other, so text after them does not depend on their order."""
        run(checker, "order_of_paths_does_not_matter")

    def test_layout_beyond_the_context_is_refused(self, checker: EngineChecker) -> None:
        """A layout with a path that ends behind the context raises `EngineError`, and the engine lives on."""
        run(checker, "layout_beyond_the_context_is_refused")

    def test_grammar_keeps_turns_in_its_language(self, checker: EngineChecker) -> None:
        """Texts that end by themselves are in the language, cut ones begin one, and other requests are not touched."""
        run(checker, "grammar_keeps_turns_in_its_language")

    def test_grammar_logprobs_are_of_the_masked_distribution(self, checker: EngineChecker) -> None:
        """A choice between texts of one token each: their probabilities under the model, divided by their sum."""
        run(checker, "grammar_logprobs_are_of_the_masked_distribution")

    def test_grammar_goes_on_behind_the_start_of_a_turn(self, checker: EngineChecker) -> None:
        """A request that continues an interrupted turn is only allowed the rest of its text."""
        run(checker, "grammar_goes_on_behind_the_start_of_a_turn")

    def test_wrong_grammar_is_refused(self, checker: EngineChecker) -> None:
        """A grammar that cannot be compiled raises `EngineError`, and the engine lives on."""
        run(checker, "wrong_grammar_is_refused")

    def test_picture_logprobs_are_those_of_the_model(self, checker: EngineChecker) -> None:
        """Of requests at once, with several pictures, one or none, each has the scores of one forward pass."""
        run(checker, "picture_logprobs_are_those_of_the_model")

    def test_same_ids_with_another_picture(self, checker: EngineChecker) -> None:
        """A prefix cache knows pictures of equally many placeholders apart."""
        run(checker, "same_ids_with_another_picture")

    def test_pictures_in_later_turns(self, checker: EngineChecker) -> None:
        """A context that grows by its own tokens, a text and a picture in each turn has the scores of the whole."""
        run(checker, "pictures_in_later_turns")

    def test_pictures_after_an_update(self, checker: EngineChecker) -> None:
        """An engine with updates sees a picture of an earlier request through its new weights."""
        run(checker, "pictures_after_an_update")

    def test_wrong_placeholders_are_refused(self, checker: EngineChecker) -> None:
        """Placeholders that differ from the processor's raise `EngineError` with the picture; the engine lives on."""
        run(checker, "wrong_placeholders_are_refused")

    def test_broken_picture_is_refused(self, checker: EngineChecker) -> None:
        """Bytes that are no picture raise `EngineError` with the picture's key, and the engine lives on."""
        run(checker, "broken_picture_is_refused")

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


def in_an_actor(job: ActorJob) -> tuple[int, ...]:
    """Let an actor of Ray build an engine and ask it; skip the test where Ray is not installed."""
    pytest.importorskip("ray", reason="Ray is not installed in this engine's environment")
    command = [sys.executable, "-m", "turnwise_testing.engines.actor_run"]
    done = subprocess.run(command, input=pickle.dumps(job), capture_output=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def run(checker: EngineChecker, name: str, delays: Delays = NO_DELAYS) -> None:
    """Run one check in a test; skip it, and say why, when the engine lacks the capability."""
    if missing := checker.run(name, delays):
        pytest.skip(missing)
