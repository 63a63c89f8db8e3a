"""The checks of grammars pass on a good engine, and each fails on a broken one."""

import itertools
import re

import numpy as np
import pytest
from attrs import evolve

from turnwise.errors import EngineError
from turnwise.types import GenerateResult
from turnwise_testing.checks.engine.run import ENGINE_CHECKS, EngineChecker
from turnwise_testing.engines.bigram import BigramEngine, BigramReference, log_softmax
from turnwise_testing.probes.engine import EngineProbe, Letters

VOCAB_SIZE, END = 64, 2
IDS = {"a": 10, "b": 20, "7": 30}
NAMES = {token: text for text, token in IDS.items()}
LETTERS = Letters(ids=IDS, end_id=END, decode=lambda ids: "".join(NAMES.get(int(token), "?") for token in ids))
PROBE = EngineProbe(vocab_size=VOCAB_SIZE, reference=BigramReference(VOCAB_SIZE), letters=LETTERS, timeout_s=60.0)
CHECKS = [name for name, check in ENGINE_CHECKS.items() if check.letters]


class GrammarEngine(BigramEngine):
    """Lists the whole language of a grammar, which has at most four letters."""

    masks = True
    reads_start = True
    refuses = True

    @property
    def capabilities(self):
        return evolve(super().capabilities, grammars=True)

    async def generate(self, request):
        if request.grammar is None:
            return await super().generate(request)
        pattern = re.sub(r'[" ]', "", request.grammar.text.removeprefix("start: "))
        if self.refuses and "nothing" in pattern:
            raise EngineError("the grammar has an unknown rule")
        language = [
            "".join(text)
            for size in range(1, 5)
            for text in itertools.product(IDS, repeat=size)
            if re.fullmatch(pattern, "".join(text))
        ]
        context, num_read = request.token_ids.tolist(), request.grammar.num_read if self.reads_start else 0
        text = LETTERS.decode(context[len(context) - num_read :])
        random = np.random.default_rng(request.sampling.seed)
        ids, logprobs = [], []
        while len(ids) < request.sampling.max_tokens and END not in ids:
            allowed = {IDS[word[len(text)]] for word in language if word.startswith(text) and word != text}
            allowed |= {END} if text in language else set()
            scores = log_softmax(self._weights[context[-1]], request.sampling.temperature).astype(np.float64)
            masked = np.full(VOCAB_SIZE, -np.inf)
            masked[list(allowed)] = scores[list(allowed)]
            masked -= np.logaddexp.reduce(masked)
            token = self.choose(random, np.exp(masked), ids)
            ids.append(token)
            logprobs.append((masked if self.masks else scores)[token])
            context.append(token)
            text += NAMES.get(token, "")
        return self._result(ids, (np.minimum(logprobs, 0), [0] * len(ids)), {END}, aborted=False)

    def choose(self, random, shares, _ids):
        return int(random.choice(VOCAB_SIZE, p=shares))


class ForgetsTheMask(GrammarEngine):
    masks = False


class ReadsNoStart(GrammarEngine):
    reads_start = False


class TakesAnyGrammar(GrammarEngine):
    refuses = False

    async def generate(self, request):
        if request.grammar is not None and "nothing" in request.grammar.text:
            return GenerateResult(token_ids=[END], logprobs=[0.0], finish_reason="stop")
        return await super().generate(request)


class StopsEarly(GrammarEngine):
    def choose(self, random, shares, ids):
        return END if len(ids) == 1 else super().choose(random, shares, ids)


BROKEN = [
    (StopsEarly, "grammar_keeps_turns_in_its_language", "ended before the grammar allows it"),
    (ForgetsTheMask, "grammar_logprobs_are_of_the_masked_distribution", "log-probabilities are off by"),
    (ReadsNoStart, "grammar_goes_on_behind_the_start_of_a_turn", "ids of the rest of a turn"),
    (TakesAnyGrammar, "wrong_grammar_is_refused", "unknown rule: expected an EngineError"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_a_good_engine_passes(name):
    """Each check passes on an engine without a mistake."""
    with EngineChecker(lambda: GrammarEngine(vocab_size=VOCAB_SIZE), PROBE) as checker:
        assert checker.run(name) == ""


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(("kind", "name", "message"), BROKEN, ids=[each[0].__name__ for each in BROKEN])
def test_a_broken_engine_is_caught(kind, name, message):
    """The check that is about the broken promise fails, and says what the engine did."""
    with (
        EngineChecker(lambda: kind(vocab_size=VOCAB_SIZE), PROBE) as checker,
        pytest.raises(AssertionError, match=message),
    ):
        checker.run(name)


def test_each_check_can_fail():
    """And none applies without the letters."""
    assert {name for _, name, _ in BROKEN} == set(CHECKS)
    with EngineChecker(lambda: GrammarEngine(vocab_size=VOCAB_SIZE), evolve(PROBE, letters=None)) as checker:
        assert {checker.run(name) for name in CHECKS} == {"the probe has no letters for grammars"}
