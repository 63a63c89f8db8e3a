"""The fused decoder gives the results of the generic one, for every architecture, batch and interleaving."""

import asyncio

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise.protocols import Resources
from turnwise.types import SamplingParams
from turnwise_testing.engines.scenarios import VOCAB_SIZE, forward_logprobs, run_scenario, simple_request
from turnwise_testing.references.reference_model import save_random_model
from turnwise_transformers_engine import TransformersConfig, TransformersEngine
from turnwise_transformers_engine.fused import model as fused_model
from turnwise_transformers_engine.fused import native_kernel, packed_product
from turnwise_transformers_engine.fused import probe as fused_probe
from turnwise_transformers_engine.fused.batch_sampling import (
    make_columns,
    sample_rows,
    sampling_values,
    uniform_numbers,
)
from turnwise_transformers_engine.fused.model import Chunk, FusedModel
from turnwise_transformers_engine.fused.operators import TorchOperators
from turnwise_transformers_engine.fused.packed_product import Product, packing_refusal
from turnwise_transformers_engine.fused.prefix_pages import PrefixPages
from turnwise_transformers_engine.fused.slab import Slab
from turnwise_transformers_engine.layouts.row_sampling import sample

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ARCHITECTURES = {
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3-64": transformers.Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "llama": transformers.LlamaConfig(
        **SIZES, rope_parameters={**SCALED, "original_max_position_embeddings": 128}, head_dim=8
    ),
    "llama-1-group": transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=8),
}


@pytest.fixture
def decoder():
    """These tests choose the decoder themselves."""
    return "fused"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def directory(request, tmp_path_factory):
    """The directory of a model of each architecture."""
    return save_random_model(ARCHITECTURES[request.param], tmp_path_factory.mktemp(request.param))


def load(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("pack_from", [None, 1])
@pytest.mark.parametrize("operators", ["torch", "c"])
def test_logits_equal_those_of_the_model(directory, operators, pack_from):
    """Prefills, chunks and single tokens agree with the model to rounding, by torch and by C, packed and not."""
    fused = FusedModel(load(directory), 64, pack_from)
    if operators == "c":
        fused.operators = native_kernel.load_operators()
        if isinstance(fused.operators, str):
            pytest.skip(fused.operators)

    assert fused_probe.largest_difference(fused) < 1e-5


needs_bfloat16 = pytest.mark.skipif(
    bool(packing_refusal(torch.bfloat16)), reason=packing_refusal(torch.bfloat16) or "the processor has it"
)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)])
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    width=st.integers(1, 80),
    outputs=st.integers(1, 80),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_packed_products_are_those_of_linear(dtype, num_rows, width, outputs, biased, seed):
    """For any shape: of inputs in the dtype, up to one rounding; sums that are added to have all digits of float32."""
    generator = torch.Generator().manual_seed(seed)
    weight, rows, sums = (
        torch.randn(size, generator=generator) for size in ((outputs, width), (num_rows, width), (num_rows, outputs))
    )
    bias = torch.randn(outputs, generator=generator) if biased else None
    product, sum_product = Product(weight, bias, dtype), Product(weight, packed_dtype=dtype)

    weight, rows, bias = (None if each is None else each.to(dtype).float() for each in (weight, rows, bias))
    close = {"rtol": 1e-4 if dtype == torch.float32 else 2**-7, "atol": 1e-4}
    torch.testing.assert_close(product(rows), torch.nn.functional.linear(rows, weight, bias), **close)
    torch.testing.assert_close(
        sum_product.added(rows, 1e4 * sums), 1e4 * sums + sum_product(rows), rtol=1e-6, atol=1e-4
    )


@needs_bfloat16
def test_products_in_bfloat16_are_near_the_model(directory, monkeypatch):
    """Every architecture can have them, and their difference is in the log."""
    monkeypatch.setattr(fused_probe, "SMALLEST", 1)
    fused, text = fused_probe.fuse(load(directory), 64, packs=False, product_dtype=torch.bfloat16)

    assert torch.bfloat16 == fused.packed_dtype
    assert "products in bfloat16 change logits by" in text
    assert 1e-5 < fused_probe.largest_difference(fused) < 0.1


@needs_bfloat16
def test_an_update_reaches_rounded_weights(tiny_model, other_model, other_weights, serve, ask, monkeypatch):
    """Sampled tokens have log-probabilities near the new weights' own, and not those of float32."""
    monkeypatch.setattr(fused_probe, "SMALLEST", 1)

    async def scenario(engine):
        before = await engine.generate(ask("before"))
        await engine.update_weights(other_weights, 1)
        return before, await engine.generate(ask("updated"))

    before, updated = serve(tiny_model, scenario, product_dtype="bfloat16")
    for result, model in ((before, load(tiny_model)), (updated, other_model)):
        exact = forward_logprobs(model, ask("a"), result.token_ids)
        gaps = np.abs(result.logprobs - exact)
        assert 1e-4 < gaps.max() < 0.2
        assert gaps.mean() < 0.05


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"decoder": "generic"}, "engine.decoder is 'generic'"),
        ({"decoder": "auto", "attn_implementation": "eager"}, "the fused decoder is for a CPU"),
        ({"decoder": "auto"}, "the processor has no instructions for bfloat16"),
    ],
)
def test_bfloat16_is_refused_where_it_is_impossible(tiny_model, serve, monkeypatch, options, reason):
    """One line says why; the run does not go on with other products than its config names."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    async def scenario(_engine):
        raise AssertionError("the engine has started")

    with pytest.raises(ConfigError, match=f"engine.product_dtype is 'bfloat16', which .* cannot have: {reason}"):
        serve(tiny_model, scenario, product_dtype="bfloat16", **options)


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """The forward pass of one architecture."""
    return FusedModel(load(save_random_model(ARCHITECTURES["qwen3"], tmp_path_factory.mktemp("chunks"))), 64)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.lists(st.tuples(st.sampled_from([0, 0, 5, 16]), st.sampled_from([1, 4, 9])), min_size=1, max_size=10),
    most_keys=st.sampled_from([1, 30, 1 << 14]),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_chunks_together_equal_chunks_alone(fused, places, most_keys, seed):
    """Chunks of equal and of other places, in any order and number per call, have the logits and keys of each alone."""
    generator = torch.Generator().manual_seed(seed)
    long, short = (Slab.make(32, fused.num_layers, fused.num_groups, fused.depth, torch.device("cpu")) for _ in "12")
    for slab in (long, short):
        slab.reserve(len(places))
        slab.data.normal_(generator=generator)
    rows = torch.randperm(len(places), generator=generator).tolist()
    chunks = [
        Chunk(
            short if row % 3 == 0 else long,
            row,
            past,
            torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist(),
        )
        for row, (past, count) in zip(rows, places, strict=True)
    ]
    before = [slab.data.clone() for slab in (long, short)]
    alone = torch.cat([fused.prefill([chunk]) for chunk in chunks])
    expected = [slab.data.clone() for slab in (long, short)]
    for slab, data in zip((long, short), before, strict=True):
        slab.data.copy_(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_model, "_MOST_KEYS", most_keys)
        together = fused.prefill(chunks)

    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    for slab, data in zip((long, short), expected, strict=True):
        torch.testing.assert_close(slab.data, data, rtol=1e-4, atol=1e-5)


@pytest.mark.many_cases(3)
def test_greedy_output_equals_the_generic_decoder(directory, together):
    """Greedy tokens are the same."""
    lengths = (1, 5, 16, 33, 70)

    def run(decoder):
        config = TransformersConfig(model=directory, device="cpu", max_context=256, decoder=decoder)
        requests = [
            simple_request(f"{n}-{t}", np.arange(n) * 7 % VOCAB_SIZE, temperature=t, seed=n, max_tokens=20)
            for n in lengths
            for t in (0.0, 1.0)
        ]
        return run_scenario(
            TransformersEngine(config, Resources()), lambda engine: together(engine, requests), timeout_s=120
        )

    fused, generic = run("fused"), run("generic")

    assert [each.token_ids.tolist() for each in fused[::2]] == [each.token_ids.tolist() for each in generic[::2]]


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 25),  # steps before it is sent
        st.integers(1, 80),  # context
        st.integers(1, 40),  # tokens
        st.sampled_from(["", "", "", "abort", "cancel"]),
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=REQUESTS, num_blocks=st.sampled_from([10, 40]), caching=st.booleans(), max_batch_tokens=st.just(48))
def test_joins_and_leaves_change_no_result(
    tiny_model, assert_logprobs, requests, num_blocks, caching, max_batch_tokens
):
    """Whatever joins, ends or is aborted in mid-decode, also without space, each output is that of its request."""
    contexts = [np.resize(np.arange(index % 3, 90), context) for index, (_, context, *_) in enumerate(requests)]

    async def send(engine, index):
        delay, _context, max_tokens, end, temperature = requests[index]
        decoder = engine._backend.decoder
        while decoder.num_steps < delay and engine.stats()["num_running"]:  # noqa: ASYNC110 - the decoder has no event for it
            await asyncio.sleep(0)
        sent = simple_request(str(index), contexts[index], max_tokens=max_tokens, temperature=temperature, seed=index)
        task = asyncio.ensure_future(engine.generate(sent))
        await asyncio.sleep(0.001 * (index % 3))
        if end == "abort":
            await engine.abort(str(index))
        elif end == "cancel":
            task.cancel()
        return await asyncio.wait([task]) and None if end == "cancel" else await task

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(engine, index)) for index in range(len(requests))]
        await engine.generate(simple_request("last", max_tokens=2))
        return [task.result() for task in tasks], len(engine._backend.decoder._batch), dict(engine._backend._rows)

    config = TransformersConfig(
        model=tiny_model,
        device="cpu",
        max_context=128,
        num_blocks=num_blocks,
        prefix_caching=caching,
        max_batch_tokens=max_batch_tokens,
        decoder="fused",
    )
    results, num_left, rows = run_scenario(TransformersEngine(config, Resources()), scenario, timeout_s=120)

    assert (num_left, rows) == (0, {})
    for (_, _, max_tokens, end, temperature), context, result in zip(requests, contexts, results, strict=True):
        if result is None:
            continue
        if not end:
            assert len(result.token_ids) == max_tokens
        if temperature and len(result.token_ids):
            assert_logprobs(result, tiny_model, context)


def test_a_seed_gives_the_same_tokens_in_any_company(tiny_model, serve, together):
    """Tokens depend on the seed of the request, and not on the other requests."""
    seeds = [3, 3, 4, 2**64 + 3]

    def run(others):
        requests = [simple_request(f"seed {i}", seed=seed) for i, seed in enumerate(seeds)]
        return serve(tiny_model, lambda engine: together(engine, [*requests, *others]))[: len(seeds)]

    alone, beside = (
        [result.token_ids.tolist() for result in run([simple_request(str(i)) for i in range(n)])] for n in (0, 9)
    )

    assert alone == beside
    assert alone[0] == alone[1] == alone[3]
    assert alone[0] != alone[2]


def test_updates_and_sleep_reach_the_fused_weights(tiny_model, other_model, other_weights, serve, ask, assert_logprobs):
    """After an update, and after level 2 and an update, all tokens come from the new weights."""

    async def scenario(engine):
        results = [await engine.generate(ask())]
        await engine.update_weights(other_weights, 1)
        results.append(await engine.generate(ask()))
        await engine.sleep(2)
        await engine.wake_up(["weights"])
        await engine.update_weights(other_weights, 2)
        await engine.wake_up(["kv_cache"])
        return [*results, await engine.generate(ask())]

    before, updated, woken = serve(tiny_model, scenario)

    assert_logprobs(before, tiny_model)
    assert_logprobs(updated, other_model)
    assert_logprobs(woken, other_model)


def test_the_models_own_forward_pass_follows_an_update(tiny_model, other_weights):
    """Fused weights and the model's parameters are the same memory."""
    fused = FusedModel(load(tiny_model), 64)
    with torch.no_grad():
        for name, weight in other_weights:
            fused.model.state_dict()[name].copy_(torch.from_numpy(weight.copy()))
    fused.refresh()

    assert fused_probe.largest_difference(fused) < 1e-5


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2), "architecture 'gpt2'"),
        (transformers.MistralConfig(**SIZES, sliding_window=8), "sliding window"),
        (transformers.LlamaConfig(**SIZES, mlp_bias=True), "have a bias"),
        (transformers.LlamaConfig(**SIZES, hidden_act="gelu"), "activation is gelu"),
    ],
)
def test_other_models_use_the_generic_decoder(tmp_path, config, reason, capsys):
    """`auto` falls back and logs the reason; `fused` is refused with it."""
    directory = save_random_model(config, tmp_path)

    async def scenario(engine):
        return type(engine._backend).__name__, len((await engine.generate(simple_request())).token_ids)

    def run(decoder):
        options = TransformersConfig(model=directory, device="cpu", max_context=128, decoder=decoder)
        return run_scenario(TransformersEngine(options, Resources()), scenario, timeout_s=120)

    assert run("auto") == ("ManagerBackend", 16)
    assert reason in "".join(capsys.readouterr())
    with pytest.raises(ConfigError, match=f"cannot be fused: .*{reason}"):
        run("fused")


def test_a_model_that_differs_is_refused(tiny_model, monkeypatch):
    """A wrong forward pass is noticed when the model is loaded."""
    norm = TorchOperators.norm
    monkeypatch.setattr(TorchOperators, "norm", lambda self, states, *rest: 1.001 * norm(self, states, *rest))
    monkeypatch.setattr(fused_probe, "load_operators", lambda: "none")

    fused, reason = fused_probe.fuse(load(tiny_model), 64, packs=True)

    assert fused is None
    assert "its logits differ by" in reason


def test_c_operators_that_differ_are_not_used(tiny_model, monkeypatch):
    """torch's operators are used instead."""

    class Wrong(TorchOperators):
        def gate(self, gate_up):
            return 1.1 * super().gate(gate_up)

    monkeypatch.setattr(fused_probe, "load_operators", Wrong)

    fused, reason = fused_probe.fuse(load(tiny_model), 64, packs=True)

    assert type(fused.operators) is TorchOperators
    assert "C operators or packed weights change logits by" in reason


@pytest.mark.parametrize("compiler", ["", "/no/such/compiler", "false"])
def test_no_compiler_is_no_error(tiny_model, serve, ask, assert_logprobs, monkeypatch, tmp_path, compiler):
    """Without a working C compiler torch's operators are used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(native_kernel.shutil, "which", lambda _name: None)

    assert isinstance(native_kernel.load_operators(), str)
    assert_logprobs(serve(tiny_model, lambda engine: engine.generate(ask())), tiny_model)


def test_the_compiled_code_leaves_the_processor_as_it_is():
    """Compilers link code that flushes subnormal numbers to zero, in the whole process, if they are told to be fast."""
    native_kernel.load_operators()

    assert np.float32(1e-40) * np.float32(1) > 0


def test_packed_weights_that_differ_are_not_used(tiny_model, monkeypatch):
    """Plain products are used instead."""
    added = Product.added
    monkeypatch.setattr(fused_probe, "SMALLEST", 1)
    monkeypatch.setattr(fused_probe, "packing_refusal", lambda _dtype: "")
    monkeypatch.setattr(
        Product, "added", lambda self, rows, sums: added(self, rows, sums) * (1.1 if self.packed_dtype else 1)
    )

    fused, reason = fused_probe.fuse(load(tiny_model), 64, packs=True)

    assert fused.pack_from is None
    assert "C operators or packed weights change logits by" in reason


@pytest.mark.parametrize("missing", ["oneDNN", "operator"])
def test_a_torch_without_packed_products_is_no_error(tiny_model, monkeypatch, missing):
    """The reason is in the log, and plain products are used."""
    if missing == "oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        monkeypatch.setattr(packed_product.Product, "_pack", lambda _self: torch.ops.mkldnn.no_such_operator)

    fused, reason = fused_probe.fuse(load(tiny_model), 64, packs=True)

    assert fused.pack_from is None
    assert "no packed weights: " in reason
    assert fused_probe.largest_difference(fused) < 1e-5


def test_an_update_reaches_packed_weights(
    tiny_model, other_model, other_weights, serve, ask, assert_logprobs, monkeypatch
):
    """After an update, and after sleep at level 2, no product reads a copy of the old weights."""
    monkeypatch.setattr(fused_probe, "SMALLEST", 1)

    async def scenario(engine):
        await engine.generate(ask("before"))
        await engine.update_weights(other_weights, 1)
        updated = await engine.generate(ask("updated"))
        await engine.sleep(2)
        await engine.wake_up()
        await engine.update_weights(other_weights, 2)
        return updated, await engine.generate(ask("awake"))

    for result in serve(tiny_model, scenario):
        assert_logprobs(result, other_model)


def columns(params, seeds):
    values = [sampling_values(each, seed, VOCAB_SIZE) for each, seed in zip(params, seeds, strict=True)]
    return make_columns(values, [0] * len(values))


@settings(deadline=None, max_examples=30)
@given(
    params=st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
            top_k=st.sampled_from([-1, 1, 5, 10_000]),
            top_p=st.sampled_from([1.0, 0.9, 0.3]),
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 2**32),
)
def test_sampled_ids_have_the_probability_of_one_row_alone(params, seed):
    """The log-probability equals the one of the sampler for layouts, and greedy ids are the same."""
    logits = 3 * torch.randn(len(params), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    ids, logprobs = sample_rows(logits, columns(params, range(len(params))))

    for row, each in enumerate(params):
        certain = torch.full((1, VOCAB_SIZE), -1e9)
        certain[0, ids[row]] = 0
        alone = {}
        for number in range(20):
            token, logprob = sample(logits[row : row + 1], [each], [torch.Generator().manual_seed(number)])
            alone[token[0]] = logprob[0]
        assert np.isfinite(logprobs[row])
        if ids[row] in alone:
            assert alone[ids[row]] == pytest.approx(logprobs[row], abs=1e-5)
        if each.temperature == 0:
            assert [ids[row]] == list(alone)


def test_samples_follow_the_distribution():
    """Over 20,000 seeds the frequencies of 8 ids are within five standard errors of their probabilities."""
    num = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, -2.0, 0.5, -torch.inf]).expand(num, -1)
    params = columns([SamplingParams()] * num, range(num))

    ids, logprobs = sample_rows(logits, params)

    expected = logits[0].softmax(-1).numpy()
    frequencies = np.bincount(ids, minlength=8) / num
    assert (np.abs(frequencies - expected) <= 5 * np.sqrt(expected * (1 - expected) / num)).all()
    assert np.allclose(np.exp(logprobs), expected[ids], atol=1e-6)


def test_random_numbers_are_uniform_over_seeds_and_places():
    """Streams of neighbouring seeds are unrelated, and so are neighbouring places of a stream."""
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    numbers = uniform_numbers(seeds, np.tile(np.arange(200), 200)).reshape(200, 200)

    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert len(np.unique(numbers)) == numbers.size
    assert np.abs(np.corrcoef(numbers) - np.eye(200)).max() < 0.4
    assert np.abs(np.corrcoef(numbers.T) - np.eye(200)).max() < 0.4


@settings(deadline=None, max_examples=60)
@given(
    stored=st.lists(st.lists(st.integers(0, 1), max_size=20), max_size=12),
    wanted=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    most=st.integers(0, 6),
)
def test_pages_return_what_was_stored_for_the_prefix(stored, wanted, most):
    """A found prefix is one that was stored, with its keys and values, and there are never more pages than allowed."""
    pages = PrefixPages(4, torch.empty(1, 2, 6, 4, 1, 1))

    def states(token_ids):
        """Return keys that depend on the whole prefix."""
        sums = [hash(tuple(token_ids[: end + 1])) % 9973 for end in range(len(token_ids))]
        return torch.tensor(sums, dtype=torch.float32)[None, None, :, None, None].repeat(1, 2, 1, 1, 1)

    for token_ids in stored:
        pages.store(token_ids, states(token_ids), most)
        assert len(pages) <= most
    found, _key = pages.find(wanted)
    row = torch.zeros(1, 2, 32, 1, 1)
    num = pages.load(found, row)

    assert num <= len(wanted) - 1
    assert torch.equal(row[:, :, :num], states(wanted)[:, :, :num])
    assert any(each[:num] == wanted[:num] for each in [*stored, wanted[:num]])
    if most == 6 and len(stored) == 1 and stored[0][:16] == wanted[:16]:
        assert num == min(len(stored[0]), len(wanted) - 1) // 4 * 4
