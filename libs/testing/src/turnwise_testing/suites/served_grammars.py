"""Tests of turns under a grammar of an engine that serves a real model, compared with a masked forward pass."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import evolve

from turnwise.errors import EngineError, GrammarError
from turnwise.protocols import Engine
from turnwise.types import FinishReason, GenerateRequest, GenerateResult, Grammar
from turnwise_testing.engines.scenarios import generate_together
from turnwise_testing.inputs.schemas import PERSON, Schema, random_schema
from turnwise_testing.references.masked_model import masked_logprobs
from turnwise_testing.references.reference_model import TransformersReference
from turnwise_testing.suites.served_model import numbered_request

_TOP_P_ROUNDING = 1e-5
_AT_ONCE = 32


def grammar_of(schema: Schema) -> Grammar:
    """Return the grammar of a schema's texts, with little white space, so that random replies end."""
    options = {"whitespace_pattern": "[ \\n]{0,2}"}
    return Grammar(text=f"start: %json {json.dumps({**schema, 'x-guidance': options})}")


class _Texts:
    """The tokenizer of the served model."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._path)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def text_of(self, result: GenerateResult) -> str:
        """Return the text of a turn without the id that ended it."""
        ended = result.finish_reason is FinishReason.STOP and isinstance(result.stop_reason, int)
        text: str = self.tokenizer.decode(result.token_ids[:-1] if ended else result.token_ids)
        return text


class ServedGrammarSuite:
    """
    Tests for a class that is a `ServedModelSuite` too, whose engine has grammars and stop strings.

    Attributes:
        grammar_bound: largest difference to the masked forward pass in nats, float32 against float32.
        num_schemas: random schemas that replies must fit.
        least_complete: of their replies that no limit has cut.
    """

    grammar_bound: ClassVar[float] = 1e-4
    num_schemas: ClassVar[int] = 150
    least_complete: ClassVar[int] = 60

    @pytest.fixture(scope="class")
    @classmethod
    def texts(cls, model_path: Path) -> _Texts:
        """The tokenizer of the model."""
        return _Texts(model_path)

    @pytest.fixture(scope="class")
    @classmethod
    def ask(cls, texts: _Texts) -> Callable[..., GenerateRequest]:
        """A function that returns a numbered request with a grammar, whose turn the tokenizer's end ends."""

        def make(number: int, grammar: Grammar, **sampling: object) -> GenerateRequest:
            options = {"max_tokens": 200, "seed": number, "stop_token_ids": (texts.tokenizer.eos_token_id,), **sampling}
            return evolve(numbered_request(number, **options), grammar=grammar)

        return make

    @pytest.mark.parametrize(
        "sampling", [{}, {"temperature": 0.6}, {"temperature": 1.3, "top_k": 12}, {"top_p": 0.8}], ids=str
    )
    def test_grammar_logprobs(
        self,
        engine: Engine,
        runner: asyncio.Runner,
        reference: TransformersReference,
        texts: _Texts,
        ask: Callable[..., GenerateRequest],
        sampling: dict[str, Any],
    ) -> None:
        """They are of the masked distribution, beside requests without a grammar, whose own stay right."""
        requests = [ask(number, grammar_of(PERSON), **sampling) for number in range(8)]
        free = [numbered_request(100 + number, **sampling) for number in range(8)]

        results = runner.run(
            generate_together(engine, [each for pair in zip(requests, free, strict=True) for each in pair])
        )

        ended = [each for each in results[::2] if each.finish_reason is FinishReason.STOP]
        assert len(ended) >= 4
        for result in ended:
            assert PERSON["required"] == list(json.loads(texts.text_of(result)))
        for request, result in zip(requests, results[::2], strict=True):
            assert self._error(reference.model(variant=0), texts, request, result) < self.grammar_bound
        for request, result in zip(free, results[1::2], strict=True):
            self.assert_logprobs(reference.model(variant=0), request, result)  # type: ignore[attr-defined]  # of the other suite

    def _error(self, model: object, texts: _Texts, request: GenerateRequest, result: GenerateResult) -> float:
        """Return the largest difference; an id at the border of the nucleus may be inside or outside."""
        top_p = request.sampling.top_p
        nuclei = {top_p} if top_p == 1 else {top_p - _TOP_P_ROUNDING, top_p, top_p + _TOP_P_ROUNDING}
        ids = result.token_ids.tolist()
        expected = [masked_logprobs(model, texts.tokenizer, request, ids, top_p=each) for each in nuclei]
        return float(np.abs(np.array(expected) - result.logprobs).min(axis=0).max())

    def test_greedy_turns_keep_to_a_grammar(
        self, engine: Engine, runner: asyncio.Runner, texts: _Texts, ask: Callable[..., GenerateRequest]
    ) -> None:
        """Their log-probabilities are 0, and they are the same each time."""
        requests = [ask(number, grammar_of({"enum": ["a", "bc", 7]}), temperature=0.0) for number in range(4)]

        results = [runner.run(generate_together(engine, requests)) for _ in range(2)]

        assert {json.loads(texts.text_of(each)) for each in results[0]} <= {"a", "bc", 7}
        assert {0.0} == {value for each in results[0] for value in each.logprobs.tolist()}
        assert [each.token_ids.tolist() for each in results[0]] == [each.token_ids.tolist() for each in results[1]]

    def test_a_turn_ends_only_where_its_text_may(
        self, engine: Engine, runner: asyncio.Runner, texts: _Texts, ask: Callable[..., GenerateRequest]
    ) -> None:
        """Each stop id of the request ends it there and nowhere else, also one that is a text of the grammar."""
        (digit,), end = texts.ids("3"), texts.tokenizer.eos_token_id
        stops = (texts.ids("x")[0], digit)
        requests = [ask(number, Grammar(text="start: /[0-9]{3}/"), stop_token_ids=stops) for number in range(40)]

        results = runner.run(generate_together(engine, requests))

        assert {result.finish_reason for result in results} == {FinishReason.STOP}
        for result in results:
            *ids, last = result.token_ids.tolist()
            assert (len(texts.tokenizer.decode(ids)), last in stops, end in ids) == (3, True, False)

    def test_a_stop_string_ends_a_turn_under_a_grammar(
        self, engine: Engine, runner: asyncio.Runner, texts: _Texts, ask: Callable[..., GenerateRequest]
    ) -> None:
        """Before the text is complete."""
        requests = [ask(number, Grammar(text='start: "a" "b" "a" "b" "a" "b"'), stop=("bab",)) for number in range(3)]

        results = runner.run(generate_together(engine, requests))

        assert [("abab", "bab")] * 3 == [(texts.tokenizer.decode(each.token_ids), each.stop_reason) for each in results]

    def test_a_turn_goes_on_behind_its_start(
        self, engine: Engine, runner: asyncio.Runner, texts: _Texts, ask: Callable[..., GenerateRequest]
    ) -> None:
        """The rest of an interrupted turn is the rest of its text."""
        request, start = ask(0, Grammar(text='start: "ab" | "cd"', num_read=1)), texts.ids("c")

        result = runner.run(
            engine.generate(evolve(request, token_ids=np.append(request.token_ids, start).astype(np.int32)))
        )

        assert "d" == texts.text_of(result)

    def test_a_turn_under_a_grammar_survives_updates_and_aborts(
        self,
        engine: Engine,
        runner: asyncio.Runner,
        reference: TransformersReference,
        texts: _Texts,
        ask: Callable[..., GenerateRequest],
        restore_weights: None,
    ) -> None:
        """Each log-probability is of the masked distribution, under the version that its token claims."""
        form = grammar_of({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 40, "maxItems": 40})
        requests = [ask(number, form, max_tokens=400) for number in range(6)]

        async def disturb() -> list[GenerateResult]:
            heard = asyncio.Event()
            first = evolve(requests[0], on_tokens=lambda ids: heard.set() if len(ids) else None)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(engine.generate(request)) for request in [first, *requests[1:]]]
                await heard.wait()
                await engine.update_weights(reference.weights(variant=5), 5)
                await engine.abort("r1")
            return [task.result() for task in tasks]

        results = runner.run(disturb())

        assert any(len(np.unique(result.weight_version)) == 2 for result in results)
        for request, result in zip(requests, results, strict=True):
            ids = result.token_ids.tolist()
            expected = {
                version: masked_logprobs(reference.model(variant=version), texts.tokenizer, request, ids)
                for version in (0, 5)
            }
            versions = np.broadcast_to(np.asarray(result.weight_version), len(ids))
            chosen = np.where(versions == 5, expected[5], expected[0])
            assert np.abs(chosen - result.logprobs).max(initial=0.0) < self.grammar_bound
            if result.finish_reason is FinishReason.STOP:
                assert 40 == len(json.loads(texts.text_of(result)))

    def test_a_turn_is_aborted_at_any_time(
        self, engine: Engine, runner: asyncio.Runner, ask: Callable[..., GenerateRequest]
    ) -> None:
        """Also while its grammar is compiled."""
        form = {"type": "array", "items": PERSON, "minItems": 30}

        async def abort_after(number: int, num_yields: int) -> GenerateResult:
            request = ask(number, grammar_of({**form, "maxItems": 31 + number}), max_tokens=400)
            task = asyncio.ensure_future(engine.generate(request))
            for _ in range(num_yields):
                await asyncio.sleep(0)
            await engine.abort(request.request_id)
            return await task

        results = [runner.run(abort_after(number, 1 + 3 * number)) for number in range(6)]

        assert {FinishReason.ABORT} == {result.finish_reason for result in results}

    def test_replies_to_random_schemas_fit_them(
        self,
        engine: Engine,
        runner: asyncio.Runner,
        texts: _Texts,
        ask: Callable[..., GenerateRequest],
        record_property: Callable[[str, object], None],
    ) -> None:
        """Each reply that no limit has cut."""
        import jsonschema

        schemas = [random_schema(seed) for seed in range(self.num_schemas)]
        requests = [ask(number, grammar_of(schema), max_tokens=300) for number, schema in enumerate(schemas)]
        results: list[GenerateResult] = []
        for start in range(0, len(requests), _AT_ONCE):
            results += runner.run(generate_together(engine, requests[start : start + _AT_ONCE]))

        counts = Counter(str(result.finish_reason) for result in results)
        for reason, number in counts.items():
            record_property(reason, number)
        for schema, result in zip(schemas, results, strict=True):
            if result.finish_reason is FinishReason.STOP:
                jsonschema.validate(json.loads(texts.text_of(result)), schema)
        assert counts["stop"] >= self.least_complete
        assert counts.keys() <= {"stop", "length"}

    def test_wrong_grammars_are_refused(
        self, engine: Engine, runner: asyncio.Runner, ask: Callable[..., GenerateRequest]
    ) -> None:
        """A grammar without an end, a wrong one, a keyword without a grammar, and a context that is no start of it."""
        letter = Grammar(text='start: "a"')
        requests = [
            ask(0, letter, stop_token_ids=()),
            ask(1, Grammar(text="start: nothing")),
            ask(2, grammar_of({"uniqueItems": True})),
            ask(3, evolve(letter, num_read=1)),
        ]

        texts = [_refusal(runner, engine, request) for request in requests]

        complaints = ["needs stop_token_ids", "cannot be compiled", "uniqueItems", "does not allow the token"]
        assert [True] * 4 == [complaint in text for complaint, text in zip(complaints, texts, strict=True)], texts
        assert "\n" not in "".join(texts)
        kinds = [GrammarError, GrammarError, GrammarError]
        broken = [*requests[1:3], ask(4, grammar_of({"$ref": "#"}))]
        assert kinds == [type(_error(runner, engine, request)) for request in broken]
        assert runner.run(engine.generate(ask(4, letter))).finish_reason is FinishReason.STOP


def _refusal(runner: asyncio.Runner, engine: Engine, request: GenerateRequest) -> str:
    return str(_error(runner, engine, request))


def _error(runner: asyncio.Runner, engine: Engine, request: GenerateRequest) -> EngineError:
    with pytest.raises(EngineError) as caught:
        runner.run(engine.generate(request))
    return caught.value
