"""The conformance suite of engines passes a good engine, and catches each broken one by the right check."""

import asyncio

import numpy as np
import pytest
from attrs import evolve

from turnwise.errors import EngineError, TornWeightsError
from turnwise.protocols import Engine
from turnwise.types import Capabilities, FinishReason
from turnwise_testing.checks.engine.delays import DELAYS
from turnwise_testing.checks.engine.run import ENGINE_CHECKS, EngineChecker
from turnwise_testing.engines.bigram import NAME, BigramEngine, BigramReference, bigram_weights, log_softmax
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, RandomPolicy, ScriptedEngine
from turnwise_testing.probes.engine import EngineProbe, make_request
from turnwise_testing.suites.engine import DELAYED_CHECKS, EngineSuite

VOCAB_SIZE = 64
CAPABILITIES = evolve(SCRIPTED_CAPABILITIES, max_context=256, layouts=True)
# What hangs in a broken engine must not hang the tests.
PROBE = EngineProbe(vocab_size=VOCAB_SIZE, num_long_tokens=40, timeout_s=2.0)


class OrdersPaths(ScriptedEngine):
    """Answers as if the paths of each block stood in the order of their ids."""

    async def generate(self, request):
        if request.layout is not None:
            request = evolve(request, token_ids=in_order(request), layout=None)
        return await super().generate(request)


def in_order(request):
    if request.layout.num_tokens > len(request.token_ids):
        raise EngineError("the layout ends behind the context")
    ids = request.token_ids.tolist()
    for block in dict.fromkeys(block for block, _, _ in request.layout.paths):
        spans = [(start, stop) for other, start, stop in request.layout.paths if other == block]
        ids[block : spans[-1][1]] = [token for path in sorted(ids[a:b] for a, b in spans) for token in path]
    return ids


class ChangesForLayouts(ScriptedEngine):
    """Samples something else as soon as there is a layout."""

    async def generate(self, request):
        ids = request.token_ids if request.layout is None else request.token_ids[::-1]
        return await super().generate(evolve(request, token_ids=ids))


def make(kind=OrdersPaths, **options):
    policy = RandomPolicy(vocab_size=VOCAB_SIZE)
    return kind(policy=policy, token_latency_s=0.001, **{"capabilities": CAPABILITIES, **options})


def with_sampling(request, **changes):
    return evolve(request, sampling=request.sampling.with_(**changes))


class Edited(ScriptedEngine):
    """Changes each result behind its back: `GenerateResult` itself refuses what broken engines return."""

    def __init__(self, edit, **options):
        super().__init__(**options)
        self.edit = edit

    async def generate(self, request):
        result = await super().generate(request)
        for name, value in self.edit(request, result).items():
            object.__setattr__(result, name, value)
        return result


def edited(edit):
    return lambda **options: Edited(edit, **options)


def write_context(request, _result):
    request.token_ids[0] += 1
    return {}


def lose_aborted_tokens(_request, result):
    kept = slice(0 if result.finish_reason == FinishReason.ABORT else None)
    return {"token_ids": result.token_ids[kept], "logprobs": result.logprobs[kept]}


def let_hear_another(request, _result):
    if request.on_tokens is not None:
        request.on_tokens([0])
    return {}


def lose_stop_token(_request, result):
    kept = slice(-1 if result.stop_reason is not None else None)
    return {"token_ids": result.token_ids[kept], "logprobs": result.logprobs[kept]}


class IgnoresMaxTokens(ScriptedEngine):
    async def generate(self, request):
        return await super().generate(with_sampling(request, max_tokens=request.sampling.max_tokens + 1))


class MixesUpLengths(ScriptedEngine):
    async def generate(self, request):
        others = [running.request.sampling.max_tokens for running in self._running.values()]
        return await super().generate(with_sampling(request, max_tokens=(others or [request.sampling.max_tokens])[0]))


class MixesUpContexts(ScriptedEngine):
    async def generate(self, request):
        shift = len(self._running)
        return await super().generate(evolve(request, token_ids=(request.token_ids + shift) % VOCAB_SIZE))


class NeverTwiceTheSame(ScriptedEngine):
    async def generate(self, request):
        context = np.append(request.token_ids, self.num_calls % VOCAB_SIZE)
        return await super().generate(evolve(request, token_ids=context))


class OneSeedForAll(ScriptedEngine):
    async def generate(self, request):
        return await super().generate(with_sampling(request, seed=0))


class DeafToAbort(ScriptedEngine):
    async def abort(self, request_id):
        pass


class StrictAbort(ScriptedEngine):
    async def abort(self, request_id):
        assert request_id in self._running, "unknown request"


class LeaksCancelled(ScriptedEngine):
    leaked = 0

    async def generate(self, request):
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            self.leaked += 1
            raise

    def stats(self):
        return {"num_running": super().stats()["num_running"] + self.leaked}


class SwallowsCancellation(ScriptedEngine):
    async def generate(self, request):
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            return await super().generate(request)


class CountsNothing(ScriptedEngine):
    def stats(self):
        return {"num_running": 0}


class ServesAnything(ScriptedEngine):
    async def generate(self, request):
        context = request.token_ids[:100] if len(request.token_ids) else [1]
        return await super().generate(evolve(request, token_ids=context))


class DiesOfEmptyContexts(ScriptedEngine):
    async def generate(self, request):
        if not len(request.token_ids):
            self._state = "broken"
        return await super().generate(request)


class ForgetsVersions(ScriptedEngine):
    async def update_weights(self, weights, version):
        pass


class NeverSleeps(ScriptedEngine):
    async def sleep(self, level):
        pass


class SleepsOnce(ScriptedEngine):
    async def sleep(self, level):
        if not self.sleep_state.awake:
            raise EngineError("asleep already")
        await super().sleep(level)


class NeedsNoStart(ScriptedEngine):
    async def generate(self, request):
        if self._state == "not started":
            self._state = "running"
        return await super().generate(request)


class LearnsWhatItCan(ScriptedEngine):
    async def start(self):
        await super().start()
        self.capabilities = Capabilities(abort=True)


class StopsOnce(ScriptedEngine):
    async def stop(self):
        if self._state == "stopped":
            raise EngineError("stopped already")
        await super().stop()


class NeverStops(ScriptedEngine):
    async def stop(self):
        pass


BROKEN = [
    (
        edited(lambda _, result: {"logprobs": result.logprobs[:-1]}),
        "ids_round_trip",
        "expected 8, got 7",
    ),
    (
        edited(lambda _, result: {"logprobs": result.logprobs[:-1]}),
        "logprobs",
        "expected 8, got 7",
    ),
    (edited(lambda _, result: {"token_ids": result.token_ids.astype(np.int64)}), "ids_round_trip", "int64"),
    (
        edited(lambda _, result: {"token_ids": result.token_ids + np.int32(VOCAB_SIZE)}),
        "ids_round_trip",
        "not in the vocabulary",
    ),
    (
        lambda **options: ScriptedEngine(**{**options, "capabilities": evolve(CAPABILITIES, vocab_size=2)}),
        "ids_round_trip",
        "not in the vocabulary of 2",
    ),
    (
        lambda **options: ScriptedEngine(
            **{**options, "capabilities": evolve(CAPABILITIES, vocab_size=VOCAB_SIZE + 1)}
        ),
        "ids_round_trip",
        "states a vocabulary of 65, not 64",
    ),
    (edited(write_context), "ids_round_trip", "the context after the call"),
    (IgnoresMaxTokens, "length_ends_a_turn", "number of tokens: expected 1, got 2"),
    (edited(lambda *_: {"finish_reason": FinishReason.STOP}), "length_ends_a_turn", "finish reason: expected .*LENGTH"),
    (edited(let_hear_another), "listener_hears_a_prefix", "ids that the listener heard: expected"),
    (edited(lose_stop_token), "stop_id_ends_a_turn", "ids up to the stop id"),
    (edited(lambda *_: {"stop_reason": None}), "stop_id_ends_a_turn", "stop reason: expected"),
    (edited(lambda _, result: {"logprobs": -result.logprobs}), "logprobs", "log-probabilities above 0"),
    (
        edited(lambda _, result: {"logprobs": result.logprobs * np.float32(np.inf)}),
        "logprobs",
        "not finite",
    ),
    (edited(lambda _, result: {"logprobs": result.logprobs.astype(np.float64)}), "logprobs", "float64"),
    (MixesUpLengths, "concurrent_requests_keep_identity", "number of tokens of each request"),
    (MixesUpContexts, "concurrent_requests_keep_identity", "got the answer that they get alone"),
    (NeverTwiceTheSame, "greedy_is_repeatable", "the same greedy request again"),
    (NeverTwiceTheSame, "seed_is_repeatable", "ids of one seed"),
    (OneSeedForAll, "seed_is_repeatable", "all seeds gave the same ids"),
    (edited(lose_aborted_tokens), "abort_returns_what_was_sampled", "the tokens sampled before the abort are lost"),
    (DeafToAbort, "abort_returns_what_was_sampled", "no request of 12 was aborted"),
    (StrictAbort, "abort_of_unknown_is_ignored", "unknown request"),
    (LeaksCancelled, "cancelling_frees_the_slot", "num_running to become 0 took more than"),
    (SwallowsCancellation, "cancelling_frees_the_slot", "swallowed its cancellation"),
    (CountsNothing, "stats_count_what_runs", "num_running to become 3"),
    (ServesAnything, "empty_context_is_refused", "an empty context: expected an EngineError"),
    (ServesAnything, "too_long_context_is_refused", "a context of 257 tokens: expected an EngineError"),
    (ServesAnything, "output_stays_in_max_context", "pass max_context"),
    (ChangesForLayouts, "layout_without_paths_is_plain_text", "ids with a layout of no paths"),
    (ScriptedEngine, "order_of_paths_does_not_matter", "ids with the paths in another order"),
    (ScriptedEngine, "layout_beyond_the_context_is_refused", "a layout beyond the context: expected an EngineError"),
    (edited(lambda *_: {"weight_version": np.int64(0)}), "weight_versions", "type of the weight version"),
    (edited(lambda *_: {"weight_version": -1}), "weight_versions", "weight version -1"),
    (edited(lambda *_: {"weight_version": np.zeros(1, np.int32)}), "weight_versions", "dtype and shape"),
    (ForgetsVersions, "weight_update_changes_the_version", "weight versions: expected .7., got .0."),
    (NeverSleeps, "sleep_and_wake_up", "a request to a sleeping engine"),
    (NeedsNoStart, "generate_before_start_is_refused", "a request before start"),
    (LearnsWhatItCan, "start_keeps_the_capabilities", "capabilities after start"),
    (NeverStops, "stop_twice_is_harmless", "a request after stop"),
    (NeverStops, "stop_ends_what_is_in_flight", "finish reasons of requests in flight"),
]

REFERENCE = BigramReference(VOCAB_SIZE)
BIGRAM_PROBE = evolve(PROBE, reference=REFERENCE)
PATIENT_PROBE = evolve(BIGRAM_PROBE, timeout_s=60.0)
"""For good engines, which may be late on a busy machine."""


class TakesLayouts(BigramEngine):
    """Looks at the last token alone, so that no layout makes a difference."""

    @property
    def capabilities(self):
        return evolve(super().capabilities, layouts=True)

    async def generate(self, request):
        if request.layout is not None and request.layout.num_tokens > len(request.token_ids):
            raise EngineError("the layout ends behind the context")
        return await super().generate(request)


def make_bigram(kind=TakesLayouts, **options):
    return kind(vocab_size=VOCAB_SIZE, **options)


class OffByATenth(BigramEngine):
    async def generate(self, request):
        result = await super().generate(request)
        object.__setattr__(result, "logprobs", result.logprobs - np.float32(0.1))
        return result


class KeepsItsWeights(BigramEngine):
    async def update_weights(self, weights, version):
        await super().update_weights([], version)


class StalePrefixes(BigramEngine):
    def __init__(self, **options):
        super().__init__(**options)
        self.kept = {}

    async def generate(self, request):
        key = request.token_ids.tobytes()
        result = await super().generate(request)
        object.__setattr__(result, "token_ids", self.kept.setdefault(key, result.token_ids))
        return result


class ClaimsTheLastVersion(BigramEngine):
    async def generate(self, request):
        result = await super().generate(request)
        object.__setattr__(result, "weight_version", self._version)
        return result


class TakesTheFirstHalf(BigramEngine):
    async def update_weights(self, weights, version):
        for pair in weights:
            await super().update_weights([pair], version)


class TearsAndServes(BigramEngine):
    async def update_weights(self, weights, version):
        try:
            await super().update_weights(weights, version)
        except EngineError as error:
            raise TornWeightsError(str(error)) from error


class SaysNoMore(BigramEngine):
    async def generate(self, request):
        try:
            return await super().generate(request)
        except EngineError:
            raise EngineError("no") from None


class KnowsEveryTag(BigramEngine):
    async def wake_up(self, tags=("weights", "kv_cache")):
        await super().wake_up({"weights", "kv_cache"}.intersection(tags))


class FallsAsleepAlone(BigramEngine):
    async def _end_all(self):
        pass

    async def generate(self, request):
        return evolve(await super().generate(request), finish_reason=FinishReason.LENGTH)


class ReadsItsFilesAgain(BigramEngine):
    async def wake_up(self, tags=("weights", "kv_cache")):
        dropped = self.sleep_state.level == 2
        await super().wake_up(tags)
        if "kv_cache" in tags and dropped:
            await super().update_weights(REFERENCE.weights(variant=0), self._version)


class ClaimsTheVersionOfItsArrival(BigramEngine):
    async def generate(self, request):
        version = self._version
        return evolve(await super().generate(request), weight_version=version)


class LandsLater(BigramEngine):
    """Leaves the work of a cancelled update behind, as `asyncio.to_thread` does."""

    async def update_weights(self, weights, version):
        self.landing = asyncio.ensure_future(super().update_weights(weights, version))
        await asyncio.shield(self.landing)


class WakesUpWithOtherWeights(BigramEngine):
    async def sleep(self, level):
        await super().sleep(level)
        await asyncio.sleep(0)
        self._weights = bigram_weights(VOCAB_SIZE, seed=99)


class WakesUpWithoutItsLoss(BigramEngine):
    async def wake_up(self, tags=("weights", "kv_cache")):
        await super().wake_up(tags)
        if self._weights is None:
            self._weights = bigram_weights(VOCAB_SIZE, seed=99)


BIGRAM_BROKEN = [
    (OffByATenth, "logprobs_are_those_of_the_model", "log-probabilities are off by 0.1 nats"),
    (KeepsItsWeights, "weight_update_changes_the_output", "claims weight version 1; its log-probability is off by"),
    (StalePrefixes, "no_stale_prefix_after_an_update", "claims weight version 1; its log-probability is off by"),
    (ClaimsTheLastVersion, "update_in_flight_marks_each_token", "under version 1 nats|none has tokens of two"),
    (ClaimsTheLastVersion, "updates_under_load", r"\d+ tokens are wrong; token 0 of 40 of request .* claims weight"),
    (ClaimsTheVersionOfItsArrival, "requests_around_an_update", r"claims weight version 0; .* under version 1 nats"),
    (LandsLater, "cancelled_update_serves_one_version", "tokens claim weight version 1, which was never brought"),
    (WakesUpWithOtherWeights, "cancelled_sleep_keeps_the_weights", "claims weight version 0; its log-probability"),
    (WakesUpWithoutItsLoss, "cancelled_level_2_never_serves_lost_weights", "its log-probability is off by"),
    (TakesTheFirstHalf, "failed_update_changes_nothing", "after an unknown name: expected"),
    (TearsAndServes, "failed_update_changes_nothing", "a request after an unknown name tore the weights"),
    (SaysNoMore, "generate_while_asleep_says_so", "expected an EngineError that says 'asleep', got no"),
    (KnowsEveryTag, "wrong_sleep_calls_are_refused", "an unknown tag: expected an EngineError"),
    (FallsAsleepAlone, "sleep_ends_what_is_in_flight", "finish reason of requests in flight at sleep"),
    (ReadsItsFilesAgain, "level_2_serves_what_it_is_given", "claims weight version 1; its log-probability is off by"),
]


GENERAL = [name for name, check in ENGINE_CHECKS.items() if not check.letters and not check.pictures]
"""All checks but those of grammars and pictures, which have files of their own."""


@pytest.mark.many_cases(20)
@pytest.mark.parametrize("name", GENERAL)
def test_a_good_engine_passes(name):
    """Every check passes on the engine with weights, which can all that they need."""
    with EngineChecker(make_bigram, PATIENT_PROBE) as checker:
        assert checker.run(name) == ""


@pytest.mark.many_cases
@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("name", DELAYED_CHECKS)
def test_a_good_engine_passes_under_delays(name, delays):
    """Delays are no reason to call an engine broken."""
    with EngineChecker(make_bigram, PATIENT_PROBE) as checker:
        assert checker.run(name, DELAYS[delays]) == ""


@pytest.mark.parametrize("name", [name for name in GENERAL if not ENGINE_CHECKS[name].reference])
def test_an_engine_without_weights_passes(name):
    """And on the scripted one, which has no model to compare with."""
    with EngineChecker(make, evolve(PROBE, timeout_s=60.0)) as checker:
        assert checker.run(name) == ""


@pytest.mark.parametrize(("kind", "name", "message"), BIGRAM_BROKEN, ids=[each[0].__name__ for each in BIGRAM_BROKEN])
def test_broken_weights_and_sleep_are_caught(kind, name, message):
    """The check that is about the broken promise fails, and says what the engine did."""
    with (
        EngineChecker(lambda: make_bigram(kind), BIGRAM_PROBE) as checker,
        pytest.raises(AssertionError, match=message),
    ):
        checker.run(name)


class SlightlyOther(BigramReference):
    """Variants so close to each other that the likeliest token is mostly the same, as in a trained model."""

    def _matrix(self, variant):
        noise = 0.01 * bigram_weights(self.vocab_size, seed=variant)
        return bigram_weights(self.vocab_size) + (noise if variant else 0)

    def weights(self, *, variant):
        return [(NAME, self._matrix(variant))]

    def scores(self, token_ids, num_context, *, temperature, variant):
        ids = np.array(token_ids)
        logprobs = log_softmax(self._matrix(variant)[ids[num_context - 1 : -1]], temperature)
        return np.take_along_axis(logprobs, ids[num_context:, None], 1)[:, 0], logprobs.max(axis=1)


def test_versions_that_agree_on_the_likeliest_token_are_told_apart():
    """Log-probabilities differ between versions whose greedy tokens do not."""
    probe = evolve(BIGRAM_PROBE, reference=SlightlyOther())
    with EngineChecker(make_bigram, probe) as checker:
        assert checker.run("updates_under_load") == ""


@pytest.mark.many_cases(20)
@pytest.mark.parametrize(("kind", "name", "message"), BROKEN, ids=[f"{each[1]}-{i}" for i, each in enumerate(BROKEN)])
def test_a_broken_engine_is_caught(kind, name, message):
    """The check that is about the broken promise fails, and says what the engine did."""
    with EngineChecker(lambda: make(kind), PROBE) as checker, pytest.raises(AssertionError, match=message):
        checker.run(name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DiesOfEmptyContexts, "empty_context_is_refused"),
        (SleepsOnce, "sleep_and_wake_up"),
        (StopsOnce, "stop_twice_is_harmless"),
    ],
)
def test_an_engine_that_raises_is_caught(kind, name):
    """An error of the engine's own comes out of the check as it is, out of any task group."""
    with pytest.raises(EngineError):
        EngineChecker(lambda: make(kind), PROBE).run(name)


def test_every_check_can_fail():
    """No check is there for show: a broken engine above fails each, but for the one that the others end with."""
    caught = {name for _, name, _ in BROKEN + BIGRAM_BROKEN}

    assert set(GENERAL) - caught == {"serves_when_idle"}


def test_every_check_is_a_standard_test():
    """The suite has one test for each check, and says the same about it."""
    tests = {name.removeprefix("test_"): test for name, test in vars(EngineSuite).items() if name.startswith("test_")}

    assert set(tests) == {*ENGINE_CHECKS, "fulfils_the_protocol", "is_built_in_a_ray_actor", "holds_under_delays"}
    assert set(DELAYED_CHECKS) <= set(ENGINE_CHECKS)
    for name, check in ENGINE_CHECKS.items():
        assert tests[name].__doc__ == check.function.__doc__


def test_a_check_without_its_capability_does_not_apply():
    """The answer names the capability, and the engine is not even started."""
    started = []

    def make_weak():
        engine = make(capabilities=Capabilities())
        started.append(engine)
        return engine

    answers = {name: EngineChecker(make_weak, PROBE).run(name) for name, check in ENGINE_CHECKS.items() if check.needs}

    assert answers.pop("logprobs") == ""
    assert answers.pop("logprobs_are_those_of_the_model") == "the probe has no reference to compare with"
    assert set(answers.values()) == {
        f"the engine has no capability {name!r}"
        for name in ("abort", "grammars", "layouts", "max_context", "pictures", "seeds", "weight_updates")
    }
    assert EngineChecker(make_weak, PROBE).run("sleep_and_wake_up") == "the engine has no sleep level 1"


def test_a_probe_needs_a_vocabulary():
    """Its prompts are in it, and differ."""
    with pytest.raises(ValueError, match="'vocab_size' must be"):
        EngineProbe(vocab_size=0)

    prompts = EngineProbe(vocab_size=10).prompts

    assert len(set(prompts)) == 8
    assert max(max(prompt) for prompt in prompts) < 10


def test_checks_may_share_an_engine_until_one_fails():
    """One engine serves all checks that want a running one; after a failure the next check gets a new one."""
    engines = []

    def make_next():
        engines.append(make(edited(lambda *_: {"stop_reason": None})))
        return engines[-1]

    with EngineChecker(make_next, PROBE, shared=True) as checker:
        for name in ("ids_round_trip", "logprobs", "greedy_is_repeatable"):
            checker.run(name)
        assert len(engines) == 1
        with pytest.raises(AssertionError):
            checker.run("stop_id_ends_a_turn")
        checker.run("logprobs")
        checker.run("stop_twice_is_harmless")

    assert [engine.calls[-1] for engine in engines] == [("stop",)] * 3
    assert len(engines[0].requests) > 10


def test_scripted_engine_is_an_engine():
    """The fake fulfils the protocol."""
    assert isinstance(ScriptedEngine(), Engine)


def test_a_request_is_its_own_trajectory():
    """Checks need no more of it."""
    request = make_request("a", (1, 2), PROBE.request().sampling)

    assert (request.request_id, request.trajectory_id, request.token_ids.tolist()) == ("a", "a", [1, 2])
