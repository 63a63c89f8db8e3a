"""
Checks of engines with grammars.

The grammars allow so few texts that the checks know the masked distribution without a library of grammars.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve

from turnwise.protocols import Engine
from turnwise.types import FinishReason, GenerateRequest, Grammar, SamplingParams
from turnwise_testing.checks.engine.check import engine_check
from turnwise_testing.probes.engine import EngineProbe, Letters, expect, expect_equal, expect_refusal


@engine_check(needs="grammars", letters=True)
async def check_grammar_keeps_turns_in_its_language(engine: Engine, probe: EngineProbe) -> None:
    """Texts that end by themselves are in the language, cut ones begin one, and other requests are not touched."""
    letters = _letters(probe)
    words = "|".join(f'"{text}"' for text in letters.ids)
    free = [await probe.ask(engine, probe.request(number)) for number in range(4)]
    requests = [_request(probe, number, f"start: ({words}){{2,4}}", max_tokens=1 + number) for number in range(6)]
    results = await probe.ask_together(engine, [*requests, *(probe.request(number) for number in range(4))])
    for request, result in zip(requests, results, strict=False):
        ended = result.finish_reason is FinishReason.STOP
        ids = result.token_ids[:-1] if ended else result.token_ids
        text = letters.decode(ids)
        rest = text
        for word in letters.ids:
            rest = rest.replace(word, "")
        expect(not rest and len(text) <= 4, f"{text!r} is not in the language of {request.grammar}")
        expect(not ended or len(text) >= 2, f"{text!r} ended before the grammar allows it")
        expect(ended or len(ids) == request.sampling.max_tokens, f"{text!r} was cut before its limit")
    others = [result.token_ids.tolist() for result in results[len(requests) :]]
    expect_equal(others, [result.token_ids.tolist() for result in free], "ids of requests without a grammar")


@engine_check(needs="grammars", reference=True, letters=True)
async def check_grammar_logprobs_are_of_the_masked_distribution(engine: Engine, probe: EngineProbe) -> None:
    """A choice between texts of one token each: their probabilities under the model, divided by their sum."""
    letters, reference = _letters(probe), probe.reference
    assert reference is not None
    words, errors = " | ".join(f'"{text}"' for text in letters.ids), []
    for temperature in (1.0, 0.6):
        requests = [_request(probe, number, f"start: {words}", temperature=temperature) for number in range(6)]
        for request, result in zip(requests, await probe.ask_together(engine, requests), strict=True):
            context = request.token_ids.tolist()
            scores = {
                token: reference.scores([*context, token], len(context), temperature=temperature, variant=0)[0][0]
                for token in letters.ids.values()
            }
            token = int(result.token_ids[0])
            expect(token in scores, f"the token {token} is none of {list(scores)}")
            expected = scores[token] - np.logaddexp.reduce(list(scores.values()))
            errors.append(abs(float(result.logprobs[0]) - float(expected)))
            expect_equal(result.token_ids[1:].tolist(), [letters.end_id], "ids after a complete text")
            errors.append(abs(float(result.logprobs[1])))  # no other id was possible
    probe.measured["grammar_logprob_error"] = max(errors)
    expect(max(errors) <= probe.logprob_bound, f"log-probabilities are off by {max(errors):.3g} nats")


@engine_check(needs="grammars", letters=True)
async def check_grammar_goes_on_behind_the_start_of_a_turn(engine: Engine, probe: EngineProbe) -> None:
    """A request that continues an interrupted turn is only allowed the rest of its text."""
    letters = _letters(probe)
    first, second = list(letters.ids)[:2]
    request = _request(probe, 0, f'start: "{first}" "{second}"')
    context = np.append(request.token_ids, np.int32(letters.ids[first]))
    rest = evolve(request, token_ids=context, grammar=Grammar(text=f'start: "{first}" "{second}"', num_read=1))
    result = await probe.ask(engine, rest)
    expect_equal(result.token_ids.tolist(), [letters.ids[second], letters.end_id], "ids of the rest of a turn")


@engine_check(needs="grammars", letters=True)
async def check_wrong_grammar_is_refused(engine: Engine, probe: EngineProbe) -> None:
    """A grammar that cannot be compiled raises `EngineError`, and the engine lives on."""
    await expect_refusal(engine.generate(_request(probe, 0, "start: nothing")), "a grammar with an unknown rule")
    await probe.ask(engine, probe.request())


def _letters(probe: EngineProbe) -> Letters:
    assert probe.letters is not None
    return probe.letters


def _request(
    probe: EngineProbe, number: int, grammar: str, *, max_tokens: int = 8, temperature: float = 1.0
) -> GenerateRequest:
    sampling = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, stop_token_ids=(_letters(probe).end_id,), seed=number
    )
    return evolve(probe.request(number, sampling), grammar=Grammar(text=grammar))
