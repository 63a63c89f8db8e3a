"""The parts that engine plugins share: model directories, request and weight checks, results, error texts."""

import json

import numpy as np
import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from turnwise.errors import ConfigError, EngineError
from turnwise.protocols import ModelSpec, Resources
from turnwise.types import GenerateResult
from turnwise_engine_support.arguments import did_you_mean, engine_args_validator, unknown_argument
from turnwise_engine_support.error_lines import engine_errors, error_line
from turnwise_engine_support.model_directory import (
    check_model_directory,
    checkpoint_shapes,
    model_limit,
    model_spec,
    model_vocab_size,
    read_model_config,
)
from turnwise_engine_support.picture_families import FAMILIES
from turnwise_engine_support.requests import check_context, check_not_in_flight, is_greedy, num_new_tokens
from turnwise_engine_support.results import RequestCounters, clip_logprobs, version_spans, weight_versions
from turnwise_engine_support.weight_checks import (
    ExpectedWeights,
    check_dtype,
    checkpoint_name,
    expected_weights,
)
from turnwise_testing.engines.scenarios import simple_request

SHAPES = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.mlp.experts.0.up_proj.weight": (4, 4),
    "model.layers.0.mlp.experts.1.up_proj.weight": (4, 4),
    "model.norm.weight": (4,),
}
TIED = ExpectedWeights(SHAPES, tied=True, fused=[["q_proj", "k_proj"]])


def test_the_engines_own_model_wins_and_is_not_trusted(tmp_path):
    """Trust and revision of the run's model do not extend to another directory."""
    trusted = Resources(model=ModelSpec(path=tmp_path / "run", trust_remote_code=True, revision="abc"))

    assert model_spec(tmp_path / "own", trusted) == ModelSpec(path=tmp_path / "own")
    assert model_spec(tmp_path / "run", trusted) == model_spec(None, trusted) == trusted.model


def test_a_wrong_model_directory_is_refused(tmp_path):
    """The error names the option, the missing directory, or the missing file."""
    texts = []
    for path in (None, tmp_path / "no", tmp_path):
        with pytest.raises(ConfigError) as caught:
            check_model_directory(ModelSpec(path=path), "vllm")
        texts.append(str(caught.value))
    (tmp_path / "config.json").write_text("{}")

    assert texts == [
        "the vllm engine has no model: set model.path, or engine.model",
        f"the model directory '{tmp_path / 'no'}' does not exist",
        f"'{tmp_path}' is not a model directory: it has no config.json",
    ]
    assert check_model_directory(ModelSpec(path=tmp_path), "vllm") == tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"max_position_embeddings": 64}', 64),
        ('{"text_config": {"max_position_embeddings": 32}}', 32),
        ('{"max_position_embeddings": "many"}', None),
        ("[1]", None),
        ("{", None),
        (None, None),
    ],
)
def test_the_models_limit_is_read_from_its_config(tmp_path, text, expected):
    """A missing or broken file gives no limit: the start of the engine reports it."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)

    assert expected == model_limit(tmp_path)


def test_a_model_without_a_path_has_no_config(tmp_path, monkeypatch):
    """A `config.json` in the working directory belongs to something else."""
    monkeypatch.chdir(tmp_path)

    assert (read_model_config(None), model_limit(None)) == ({}, None)


@pytest.mark.parametrize(
    ("config", "expected"), [({"vocab_size": 512}, 512), ({"vocab_size": "512"}, None), ({}, None)]
)
def test_the_vocabulary_is_that_of_the_config(tmp_path, config, expected):
    """Also of the text model's part; anything but a number says nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))

    assert expected == model_vocab_size(tmp_path)


def test_shapes_come_from_the_headers_of_all_files(tmp_path):
    """A model's weights may be spread over several files."""
    arrays = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    parts = list(arrays.items())
    save_file(dict(parts[:3]), tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file(dict(parts[3:]), tmp_path / "model-2.safetensors")

    assert checkpoint_shapes(tmp_path) == SHAPES
    assert checkpoint_shapes(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "request 'a' has an empty context"),
        ([1] * 64, "request 'a' has a context of 64 tokens: max_context is 64, output included"),
        ([1, 512], "request 'a' has ids outside the vocabulary of 512"),
        ([1, -1], "request 'a' has ids outside the vocabulary of 512"),
    ],
)
def test_a_bad_context_is_refused(ids, message):
    """One line that says what is wrong with the request."""
    request = simple_request(token_ids=np.array(ids, np.int32))

    with pytest.raises(EngineError, match=f"^{message}$"):
        check_context(request, max_context=64, vocab_size=512)


def test_unknown_limits_are_not_checked():
    """Only a server knows them."""
    check_context(simple_request(token_ids=[9999] * 100), max_context=None)


def test_an_id_in_flight_is_refused():
    """`abort` could not tell the two requests apart."""
    check_not_in_flight(simple_request("b"), {"a"})
    with pytest.raises(EngineError, match="request 'a' is in flight already"):
        check_not_in_flight(simple_request("a"), {"a"})


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 60), (5, 5), (60, 60), (61, 60)])
def test_the_output_fits_the_context(max_tokens, expected):
    """The request's `max_tokens`, but never more than the space after its context."""
    assert expected == num_new_tokens(simple_request(token_ids=[1, 2, 3, 4], max_tokens=max_tokens), 64)


def test_tiny_temperatures_are_greedy():
    """Scaled logits would overflow."""
    assert [True, True, False] == [is_greedy(simple_request(temperature=each).sampling) for each in (0.0, 9e-6, 1e-5)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=6))
def test_each_token_has_the_version_of_its_span(parts):
    """One version is returned as a number, several as one per token; empty spans are ignored."""
    spans, expected, start = [], [], 0
    for version, length in parts:
        spans.append((version, start, start + length))
        expected += [version] * length
        start += length

    versions = weight_versions(spans, start, 9)

    assert (expected or [9]) == np.broadcast_to(versions, (start or 1,)).tolist()
    assert isinstance(versions, int) == (len(set(expected)) < 2)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=6), st.integers(0, 12))
def test_spans_of_an_output_end_with_its_tokens(parts, num_tokens):
    """The spans cover the first tokens in order, and no token that was sampled after them."""
    starts, versions = [], []
    for length, version in parts:
        starts.append((len(versions), version))
        versions += [version] * length
    num_tokens = min(num_tokens, len(versions))

    spans = version_spans(starts, num_tokens)

    assert versions[:num_tokens] == [version for version, start, end in spans for _ in range(start, end)]


@pytest.mark.parametrize("spans", [[], [(1, 0, 2)], [(1, 0, 2), (2, 2, 4)]])
def test_a_version_is_never_assumed(spans):
    """Tokens whose versions are unknown, or versions of other tokens, are an error and no guess."""
    with pytest.raises(EngineError, match=r"the weight versions of \d tokens are known, but 3 were sampled"):
        weight_versions(spans, 3, 9)


def test_logprobs_are_at_most_zero():
    """The softmax of a near-certain token may round above 1."""
    clipped = clip_logprobs([-0.5, 1e-9])

    assert ([-0.5, 0.0], np.float32) == (clipped.tolist(), clipped.dtype)


def test_counters_add_up():
    """Totals over all results, and the load of the requests in flight."""
    counters = RequestCounters()
    for cached in (0, 3):
        counters.count(
            GenerateResult(token_ids=[1, 2], logprobs=[0.0, 0.0], finish_reason="length", num_cached_tokens=cached)
        )

    assert counters.stats([simple_request(token_ids=[1, 2, 3])]) == {
        "num_running": 1,
        "num_context_tokens": 3,
        "num_requests": 2,
        "num_sampled_tokens": 4,
        "num_cached_tokens": 3,
    }


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.nrom.weight", (4,), "the model has no weight 'model.nrom.weight'; did you mean 'model.norm.weight'?"),
        ("model.norm.weight", (5,), "weight 'model.norm.weight' has shape (4,), got (5,)"),
        ("lm_head.weight", (4, 8), "weight 'model.embed_tokens.weight' has shape (8, 4), got (4, 8)"),
    ],
)
def test_names_and_shapes_must_be_the_models(name, shape, message):
    """A tied output layer must have the shape of the embedding table."""
    with pytest.raises(EngineError) as caught:
        TIED.check(name, shape)

    assert message == str(caught.value)


def test_unknown_shapes_are_not_checked():
    """A model without safetensors files cannot be checked beforehand."""
    ExpectedWeights({}).check("anything", (1,))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"model.layers.0.self_attn.q_proj.weight"},
            "1 weights are missing, such as '.*k_proj.weight': the engine f",
        ),
        ({"model.layers.0.mlp.experts.1.up_proj.weight"}, "1 weights are missing, such as '.*experts.0.up_proj.weight"),
    ],
)
def test_fused_weights_come_together(names, message):
    """The engine would fill the rest of the layer with uninitialised memory."""
    with pytest.raises(EngineError, match=message):
        TIED.check_complete(names, whole=False)


def test_a_whole_update_has_every_weight_but_a_tied_output_layer():
    """Checkpoints may contain the output layer also when it is tied."""
    expected = ExpectedWeights({**SHAPES, "lm_head.weight": (8, 4)}, tied=True)

    expected.check_complete(set(SHAPES), whole=True)
    expected.check_complete({"model.norm.weight"}, whole=False)
    with pytest.raises(EngineError, match=r"5 weights are missing, such as .*: the engine has no valid weights"):
        expected.check_complete({"model.norm.weight"}, whole=True)


@pytest.mark.parametrize("kind", ["checkpoint", "state"])
def test_a_vision_language_model_has_two_names_for_a_weight(tmp_path, kind):
    """A checkpoint of Qwen2.5-VL has older names than the state dict of which a trainer sends weights."""
    names = {
        "checkpoint": ["visual.merger.bias", "model.norm.weight", "lm_head.weight"],
        "state": ["model.visual.merger.bias", "model.language_model.norm.weight", "lm_head.weight"],
    }
    save_file({name: np.zeros((2, 3), np.float32) for name in names[kind]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    expected = expected_weights(tmp_path, fused=[])

    for sent in names.values():
        for name in sent:
            expected.check(name, (2, 3))
        expected.check_complete(set(sent), whole=True)
        with pytest.raises(EngineError, match="1 weights are missing"):
            expected.check_complete(set(sent[1:]), whole=True)
    with pytest.raises(EngineError, match="the model has no weight"):
        expected.check("visual.merger.weight", (2, 3))


def test_a_text_model_has_one_name_for_a_weight(tmp_path):
    """Its checkpoint's."""
    save_file({"model.norm.weight": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(EngineError, match="the model has no weight"):
        expected_weights(tmp_path).check("model.language_model.norm.weight", (2,))
    expected_weights(None).check("anything", (1,))


PARTS = ["model", "visual", "vision_tower", "language_model", "lm_head", "layers", "0"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.model_type)
@given(parts=st.lists(st.sampled_from(PARTS), min_size=1).map(".".join))
def test_a_name_of_the_state_dict_stays(family, parts):
    """Renaming twice is renaming once."""
    renamed = family.state_name(parts + ".weight")
    assert family.state_name(renamed) == renamed


@pytest.mark.parametrize(
    "name", ["visual.merger.bias", "model.norm.weight", "model.layers.0.a.weight", "lm_head.weight"]
)
def test_a_name_of_a_checkpoint_comes_back(name):
    """The older names of Qwen2.5-VL, which SGLang loads."""
    assert checkpoint_name(FAMILIES[0].state_name(name)) == checkpoint_name(name) == name


def test_weights_must_be_of_floating_point():
    """Integers are of another, quantised, model."""
    check_dtype("w", "bfloat16")
    with pytest.raises(EngineError, match="weight 'w' must be of floating point, got int8"):
        check_dtype("w", "int8")


@define
class Options:
    """A config with `engine_args`."""

    engine_args: dict = field(validator=engine_args_validator({"dtype": "dtype"}, {"seed"}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dtype", "'engine_args' must not contain 'dtype': set dtype"),
        ("seed", "'engine_args' must not contain 'seed': the engine sets it"),
    ],
)
def test_engine_args_hold_no_option(name, message):
    """Each setting has one place."""
    Options({"other": 1})
    with pytest.raises(ValueError, match=message):
        Options({name: 1})


def test_an_unknown_argument_is_named_with_the_closest():
    """Nothing is suggested if nothing is close."""
    known = ["block_size", "dtype"]

    assert [
        "no argument 'blok_size' (engine_args); did you mean 'block_size'?",
        "no argument 'zzz' (engine_args)",
        "",
    ] == [unknown_argument([name], known) for name in ("blok_size", "zzz", "dtype")]
    assert did_you_mean("typ", ["type"]) == "; did you mean 'type'?"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError("it failed:\n  why\nhow"), "ValueError: it failed: why"),
        (ValueError(), "ValueError"),
    ],
)
def test_errors_become_one_line(error, expected):
    """A line that ends with a colon announces the next one."""
    assert expected == error_line(error)


def test_a_pydantic_error_is_its_first_message():
    """Its text starts with the number of errors."""

    class ValidationError(ValueError):
        def errors(self):
            return [{"msg": "Value error, no such dtype\nmore"}]

    assert "ValidationError: Value error, no such dtype" == error_line(ValidationError("1 validation error"))


def test_foreign_errors_become_engine_errors():
    """An `EngineError` of the block passes unchanged."""
    for error, expected in (
        (json.JSONDecodeError("bad", "", 0), "cannot load: JSONDecodeError: "),
        (EngineError("no"), "no"),
    ):
        with pytest.raises(EngineError, match=f"^{expected}"), engine_errors("cannot load"):
            raise error
