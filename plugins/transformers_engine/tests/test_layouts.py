"""Requests with layouts: exact log-probabilities, shared prefixes, joins, weight updates, aborts, and pitfalls."""

import asyncio
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers
from attrs import evolve

from turnwise.errors import EngineError
from turnwise.layout import Layout
from turnwise.record.trajectory import Trajectory
from turnwise.types import FinishReason, GenerateRequest, SamplingParams
from turnwise_testing.references.dense import dense_attention, token_logprobs, visibility
from turnwise_testing.references.float64 import float64_throughout
from turnwise_transformers_engine.layouts.decoder import LayoutDecoder
from turnwise_transformers_engine.loading import supports_layouts

STOPS = (7, 8, 9)


@pytest.fixture
def decoder():
    """One decoder, because requests with layouts use neither."""
    return "auto"


class Player:
    """Plays episodes with blocks, and records the log-probability of each sampled token."""

    def __init__(self, sample, prompt, num_paths, **sampling):
        self._sample, self._num_paths = sample, num_paths
        self.trajectory, self.exact = Trajectory(prompt), {}
        self._sampling = SamplingParams(stop_token_ids=STOPS, **sampling)

    async def write(self, record, max_tokens):
        """Continue a record, and return the log-probabilities at full precision."""
        request = GenerateRequest(
            request_id=f"{id(self)}-{id(record)}-{len(record)}",
            trajectory_id="t",
            token_ids=record.input_ids,
            sampling=self._sampling.with_(max_tokens=max_tokens),
            layout=record.layout,
        )
        ids, logprobs, version = await self._sample(request)
        record.add_action(ids, logprobs, version)
        return logprobs

    def note(self, start, logprobs):
        """Record log-probabilities from an index on."""
        self.exact.update(enumerate(logprobs, start))

    async def play(self, num_blocks=2):
        """Play main text, blocks with forced tags and summaries, and text after the last block."""
        trajectory = self.trajectory
        for _ in range(num_blocks):
            self.note(len(trajectory), await self.write(trajectory, 5))
            paths = trajectory.fork(self._num_paths)
            for path in paths:
                path.add_forced([1])
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.write(path, 2 + 3 * i)) for i, path in enumerate(paths)]
            for path in paths:
                path.add_forced([2])
            start = len(trajectory)
            trajectory.join(paths)
            for path, task in zip(paths, tasks, strict=True):
                self.note(start + 1, task.result())
                start += len(path)
            trajectory.add_forced([3, 4, 5])
            self.note(len(trajectory), await self.write(trajectory, 6))
        self.note(len(trajectory), await self.write(trajectory, 8))
        return self


def decoder_sampler(decoder, rows=None):
    """Return a function that samples from a decoder at the model's precision, and appends its rows to `rows`."""

    async def sample(request):
        ended = asyncio.get_running_loop().create_future()

        def on_end(error):
            if error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        row = decoder.submit(request.request_id, request, request.sampling.max_tokens, on_end)
        if rows is not None:
            rows.append(row)
        await ended
        return row.progress.generated_tokens, row.progress.logprobs, 0

    return sample


def engine_sampler(engine):
    """Return a function that samples from an engine."""

    async def sample(request):
        result = await engine.generate(request)
        return result.token_ids, result.logprobs.tolist(), result.weight_version

    return sample


def load(directory, dtype=torch.float32, **options):
    """Load the model of a directory."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options).eval()


def largest_difference(model, player, temperature=1.0):
    """Return the largest difference of sampled log-probabilities to the forward pass under the layout."""
    expected = token_logprobs(model, player.trajectory, temperature)
    return max(abs(expected[index] - logprob) for index, logprob in player.exact.items())


def make_prompt(number):
    """Return a prompt whose length and ids depend on the number."""
    return np.random.default_rng(number).integers(10, 500, 4 + 3 * number)


async def play_all(sample, numbers, **sampling):
    """Play concurrent episodes of one to eight paths."""
    async with asyncio.TaskGroup() as group:
        players = [Player(sample, make_prompt(i), 1 + i % 8, **sampling) for i in numbers]
        tasks = [group.create_task(player.play()) for player in players]
    return [task.result() for task in tasks]


@pytest.mark.many_cases(2)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("kind", ["tiny_model", "tiny_llama"])
def test_logprobs_equal_the_training_forward(kind, dtype, tolerance, request):
    """
    Eight concurrent episodes agree in main text, paths, summaries, a second block and the text after it.

    The test calls the decoder itself, because results round log-probabilities to float32.
    """
    model = load(request.getfixturevalue(kind), dtype)
    decoder = LayoutDecoder(model, capacity=4096, max_batch_tokens=64)

    async def main():
        try:
            return await play_all(decoder_sampler(decoder), range(8))
        finally:
            await decoder.stop()

    with float64_throughout() if dtype == torch.float64 else nullcontext():
        players = asyncio.run(main())
        assert max(largest_difference(model, player) for player in players) < tolerance
    assert all(len(player.exact) > 20 for player in players)


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_engines_logprobs_equal_the_training_forward(sampling, implementation, tiny_model, serve):
    """The same holds through the engine, next to plain requests."""

    async def scenario(engine):
        plain = GenerateRequest(
            request_id="plain", trajectory_id="p", token_ids=make_prompt(3), sampling=SamplingParams(max_tokens=30)
        )
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(engine.generate(plain))
            playing = group.create_task(play_all(engine_sampler(engine), range(1, 6), **sampling))
        assert 30 == len(beside.result().token_ids)
        return playing.result()

    players = serve(tiny_model, scenario, attn_implementation=implementation)
    model = load(tiny_model)
    temperature = sampling.get("temperature", 1.0)
    assert max(largest_difference(model, player, temperature) for player in players) < 1e-4


def test_filters_and_greedy(tiny_model, serve):
    """Top-k 1 and temperature 0 take the best id, with log-probability 0."""

    async def scenario(engine):
        return [await play_all(engine_sampler(engine), [2], **each) for each in ({"top_k": 1}, {"temperature": 0.0})]

    (filtered,), (greedy,) = serve(tiny_model, scenario)
    assert filtered.trajectory.input_ids.tolist() == greedy.trajectory.input_ids.tolist()
    assert {0.0} == set(greedy.exact.values())


def test_seeds_repeat_paths(tiny_model, serve):
    """Requests with layouts follow their seed in any batch."""

    async def scenario(engine):
        alone = await play_all(engine_sampler(engine), [1], seed=3)
        return [*alone, *await play_all(engine_sampler(engine), [1, 2, 1, 3], seed=3)]

    first, again, _, third, _ = (p.trajectory.input_ids.tolist() for p in serve(tiny_model, scenario))
    assert first == again == third


def test_joins_reuse_the_keys_of_the_paths(tiny_model):
    """After a join only the last token of each path, its closing tag, and the join are prefilled."""
    model = load(tiny_model)
    decoder = LayoutDecoder(model, capacity=4096, seed=0)
    cached = []

    async def main():
        try:
            await Player(decoder_sampler(decoder, cached), make_prompt(20), 4).play(num_blocks=1)
        finally:
            await decoder.stop()

    asyncio.run(main())
    main_text, *paths, summary, answer = cached
    prefilled = {row: len(row.token_ids) - len(row.progress.generated_tokens) - row.num_cached for row in cached}
    assert prefilled[main_text] == len(make_prompt(20))
    assert [2, 1, 1, 1] == [prefilled[row] for row in paths], "the first path prefills the fork's last token too"
    assert 4 * 2 + 3 == prefilled[summary]
    assert 1 == prefilled[answer]


def test_paths_decode_together(tiny_model):
    """Four paths of up to forty tokens take as many passes as one, and one more at the start."""
    model = load(tiny_model)

    async def passes(num_paths):
        decoder = LayoutDecoder(model, capacity=4096)
        trajectory = Trajectory(make_prompt(5))
        try:
            paths = trajectory.fork(num_paths)
            player = Player(decoder_sampler(decoder), [1], 1)
            player._sampling = SamplingParams()
            async with asyncio.TaskGroup() as group:
                for path in paths:
                    path.add_forced([1])
                    group.create_task(player.write(path, 40))
            return decoder.num_passes
        finally:
            await decoder.stop()

    alone, together = asyncio.run(passes(1)), asyncio.run(passes(4))
    assert 40 == alone
    assert together <= alone + 1


def test_an_update_during_a_path(tiny_model, other_model, other_weights, serve):
    """A path in flight is prefilled again; each token has the log-probability of its version."""
    trajectory = Trajectory(make_prompt(4))

    async def scenario(engine):
        paths = trajectory.fork(2)
        for path in paths:
            path.add_forced([1])
        player = Player(engine_sampler(engine), [1], 1)
        player._sampling = SamplingParams()
        async with asyncio.TaskGroup() as group:
            for path in paths:
                group.create_task(player.write(path, 60))
            while min((each.num_sampled for each in engine._pending.values()), default=0) < 10:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)  # the engine has no event for a number of sampled tokens
            await engine.update_weights(other_weights, 5)
        trajectory.join(paths)
        trajectory.add_forced([3])
        await player.write(trajectory, 5)

    serve(tiny_model, scenario)
    versions = trajectory.weight_versions
    sampled = trajectory.response_mask == 1
    assert {0, 5} == set(versions[sampled].tolist())
    start = trajectory.num_prompt_tokens
    for version, model in ((0, load(tiny_model)), (5, other_model)):
        expected = token_logprobs(model, trajectory)[start:]
        own = versions == version
        np.testing.assert_allclose(trajectory.logprobs[own], expected[own], atol=1e-4, rtol=0)


def test_abort_returns_tokens_and_cancel_frees_slots(tiny_model, serve, in_flight):
    """An aborted path returns its tokens, and no cache slot stays pinned."""

    async def scenario(engine):
        request = GenerateRequest(
            request_id="a", trajectory_id="t", token_ids=make_prompt(2), sampling=SamplingParams(max_tokens=200),
            layout=Layout(),
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(request))
            await in_flight(engine)
            await engine.abort("a")
        async with asyncio.TaskGroup() as group:
            cancelled = group.create_task(engine.generate(evolve(request, request_id="b")))
            await in_flight(engine, "b")
            cancelled.cancel()
        after = await engine.generate(evolve(request, request_id="c", sampling=SamplingParams(max_tokens=3)))
        return task.result(), after, engine._layouts._tree.num_pinned

    result, after, pinned = serve(tiny_model, scenario)
    assert FinishReason.ABORT == result.finish_reason
    assert 5 <= len(result.token_ids) < 200
    assert 3 == len(after.token_ids)
    assert 0 == pinned


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_the_cache_of_layouts(level, tiny_model, other_model, other_weights, serve):
    """The pool is freed during sleep; afterwards log-probabilities are exact under the current weights."""

    async def scenario(engine):
        first = await play_all(engine_sampler(engine), [2])
        pool = engine._layouts._pool
        before = pool.pool.num_bytes
        await engine.sleep(level)
        asleep = pool.pool.num_bytes
        await engine.wake_up(["weights"])
        if level == 2:
            await engine.update_weights(other_weights, 1)
        await engine.wake_up(["kv_cache"])
        return first, before, asleep, await play_all(engine_sampler(engine), [2, 3])

    (first,), before, asleep, after = serve(tiny_model, scenario)
    assert before > 0
    assert 0 == asleep
    assert largest_difference(load(tiny_model), first) < 1e-4
    model = other_model if level == 2 else load(tiny_model)
    assert max(largest_difference(model, player) for player in after) < 1e-4


def test_a_full_cache_makes_requests_wait(tiny_model):
    """Eight episodes in a cache for two all finish with exact log-probabilities, and reuse slots."""
    model = load(tiny_model)
    decoder = LayoutDecoder(model, capacity=400, max_batch_tokens=32)

    async def main():
        try:
            return await play_all(decoder_sampler(decoder), range(8))
        finally:
            await decoder.stop()

    players = asyncio.run(main())
    assert max(largest_difference(model, player) for player in players) < 1e-4


@pytest.mark.parametrize(
    ("layout", "num_tokens", "text"),
    [(Layout(((2, 2, 30),)), 10, "layout ends at token 30, but the context has 10")],
)
def test_a_layout_that_does_not_fit_is_refused(layout, num_tokens, text, tiny_model, serve):
    """A path that ends after the context fails only its own request."""

    async def scenario(engine):
        request = GenerateRequest(
            request_id="a", trajectory_id="t", token_ids=np.arange(num_tokens), sampling=SamplingParams(max_tokens=2),
            layout=layout,
        )  # fmt: skip
        with pytest.raises(EngineError, match=text):
            await engine.generate(request)
        return await engine.generate(evolve(request, layout=Layout()))

    assert 2 == len(serve(tiny_model, scenario).token_ids)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"layer_types": None, "sliding_window": 128}, False),
        ({"layer_types": None, "sliding_window": 128, "use_sliding_window": False}, True),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, False),
        ({"rope_parameters": None, "rope_theta": None}, False),
    ],
)
def test_which_models_take_layouts(changes, expected, tmp_path):
    """They need full attention, and rotary positions that do not depend on the context length."""
    import json

    config = {"layer_types": ["full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = {key: value for key, value in (config | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert expected is supports_layouts(tmp_path)


# Pitfalls for the decoder and for every trainer


@pytest.fixture
def forked():
    """A record with a block of two paths."""
    trajectory = Trajectory(make_prompt(1))
    paths = trajectory.fork(2)
    for path, ids in zip(paths, ([11, 12, 13], [14, 15]), strict=True):
        path.add_forced(ids)
    trajectory.join(paths)
    trajectory.add_forced([16, 17, 18])
    return trajectory


def logits_of(model, trajectory, mask):
    """Return (T, V) logits at the record's positions."""
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(trajectory.input_ids[None].astype(np.int64)),
            position_ids=torch.tensor(trajectory.position_ids[None].astype(np.int64)),
            attention_mask=mask,
            use_cache=False,
        ).logits[0]


def test_a_missing_mask_means_packed_sequences(tiny_model, forked):
    """Without a mask transformers splits the sequence at every jump of positions, so masks are explicit."""
    model = load(tiny_model)
    jump = 1 + int((np.diff(forked.position_ids) != 1).argmax())
    alone = Trajectory(forked.input_ids[jump : jump + 2])

    silently = logits_of(model, forked, None)[jump : jump + 2]
    torch.testing.assert_close(silently, logits_of(model, alone, None), atol=1e-3, rtol=0)
    explicit = torch.zeros(1, 1, len(forked), len(forked)).masked_fill_(
        ~torch.from_numpy(visibility(forked)), torch.finfo(torch.float32).min
    )
    assert (silently - logits_of(model, forked, explicit)[jump : jump + 2]).abs().max() > 0.1


def test_a_boolean_mask_is_wrong_under_eager_attention(tiny_model, forked):
    """eager silently adds it to the scores as 0 and 1; sdpa interprets it correctly."""
    visible = torch.from_numpy(visibility(forked))[None, None]
    additive = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    eager, sdpa = (load(tiny_model, attn_implementation=name) for name in ("eager", "sdpa"))
    expected = logits_of(sdpa, forked, additive)

    torch.testing.assert_close(logits_of(eager, forked, additive), expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(logits_of(sdpa, forked, visible), expected, atol=1e-3, rtol=0)
    assert (logits_of(eager, forked, visible) - expected).abs().max() > 0.1


def test_the_dense_reference_is_attention(forked):
    """It equals torch's attention with the same mask."""
    torch.manual_seed(0)
    size = len(forked)
    query, key, value = torch.randn(1, 4, size, 8), torch.randn(1, 2, size, 8), torch.randn(1, 2, size, 8)
    visible = torch.from_numpy(visibility(forked))[None]

    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible[:, None], scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(dense_attention(query, key, value, visible, 0.5), expected)
