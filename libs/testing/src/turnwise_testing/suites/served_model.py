"""Tests of an engine that serves a real model: its samples and log-probabilities, compared with a forward pass."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import evolve

from turnwise.errors import EngineError
from turnwise.protocols import Engine
from turnwise.types import FinishReason, GenerateRequest, GenerateResult
from turnwise_testing.checks.engine.load import updates_under_load
from turnwise_testing.engines.scenarios import (
    forward_logprobs,
    generate_together,
    save_small_qwen3,
    simple_request,
)
from turnwise_testing.probes.engine import EngineProbe
from turnwise_testing.references.reference_model import TransformersReference

NUM_UPDATES = 100
VOCAB_SIZE = 365
"""Number of ids of the model; the tokenizer of the calculator demo has as many."""
_TOP_P_ROUNDING = 1e-5
"""Largest rounding error of a cumulative probability in float32."""
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9},
]


def numbered_request(number: int, **sampling: Any) -> GenerateRequest:
    """Return a request for 32 tokens, whose context has its own ids and length."""
    context = np.random.default_rng(number).integers(0, VOCAB_SIZE, 5 + number % 60)
    return simple_request(f"r{number}", context, **{"max_tokens": 32, **sampling})


class ServedModelSuite:
    """
    Tests that share one started engine and one small model. A subclass overrides `make_engine` and `tokenizer_dir`.

    Attributes:
        logprob_bound: largest difference to the forward pass in nats, float32 against float32.
        joint_filters: whether the engine's top-p looks at all ids; see `forward_logprobs`.
        num_cached_of_100: tokens of a context of 100 that the prefix cache returns the second time.
        partial_update: text in the names of the weights that a partial update sends.
        num_threads: threads of torch for the forward pass; None leaves them alone.
    """

    logprob_bound: ClassVar[float] = 5e-5
    joint_filters: ClassVar[bool] = False
    num_cached_of_100: ClassVar[int] = 96
    partial_update: ClassVar[str] = "layers.1."
    num_threads: ClassVar[int | None] = None

    @classmethod
    def make_engine(cls, model_path: Path) -> Engine:
        """Return an engine for a model directory, not started, with stop strings and a context of 512 tokens."""
        raise NotImplementedError("override make_engine")

    @classmethod
    def tokenizer_dir(cls) -> Path:
        """Return a directory with a tokenizer of `VOCAB_SIZE` ids."""
        raise NotImplementedError("override tokenizer_dir")

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The directory of the model."""
        return save_small_qwen3(tmp_path_factory.mktemp("qwen3"), cls.tokenizer_dir(), VOCAB_SIZE)

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, model_path: Path) -> TransformersReference:
        """The model's forward pass, under its own weights and under others."""
        if cls.num_threads is not None:
            import torch

            torch.set_num_threads(cls.num_threads)
        return TransformersReference(model_path)

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls) -> Iterator[asyncio.Runner]:
        """The event loop of the shared engine."""
        with asyncio.Runner() as runner:
            yield runner

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, model_path: Path, runner: asyncio.Runner) -> Iterator[Engine]:
        """The shared engine, because starting one takes a while."""
        engine = cls.make_engine(model_path)
        runner.run(engine.start())
        yield engine
        runner.run(engine.stop())

    @pytest.fixture
    def restore_weights(
        self, engine: Engine, runner: asyncio.Runner, reference: TransformersReference
    ) -> Iterator[None]:
        """Give the engine its first weights back after the test."""
        yield
        runner.run(engine.update_weights(reference.weights(variant=0), 0))

    def logprob_error(self, model: object, request: GenerateRequest, result: GenerateResult) -> float:
        """
        Return the largest difference of a result's log-probabilities to a forward pass.

        An id whose cumulative probability is `top_p` to rounding may be inside or outside the nucleus, and either
        choice is right, so each token is compared with the closest of both.
        """
        top_p = request.sampling.top_p
        nuclei = {top_p} if top_p == 1 else {top_p - _TOP_P_ROUNDING, top_p, top_p + _TOP_P_ROUNDING}
        requests = [evolve(request, sampling=request.sampling.with_(top_p=each)) for each in nuclei]
        expected = [forward_logprobs(model, r, result.token_ids, joint_filters=self.joint_filters) for r in requests]
        return float(np.abs(np.array(expected) - result.logprobs).min(axis=0).max())

    def assert_logprobs(self, model: object, request: GenerateRequest, result: GenerateResult) -> None:
        """Compare the log-probabilities of a result with a forward pass."""
        assert self.logprob_error(model, request, result) < self.logprob_bound

    @pytest.mark.parametrize("sampling", FILTERS, ids=str)
    def test_logprobs_are_of_the_sampling_distribution(
        self, engine: Engine, runner: asyncio.Runner, reference: TransformersReference, sampling: dict[str, Any]
    ) -> None:
        """Log-probabilities of 32 concurrent requests are of the distribution after temperature, top-k and top-p."""
        requests = [numbered_request(i, **sampling) for i in range(32)]

        results = runner.run(generate_together(engine, requests))

        model = reference.model(variant=0)
        error = max(self.logprob_error(model, *pair) for pair in zip(requests, results, strict=True))
        print(f"largest difference of 1,024 log-probabilities with {sampling}: {error:.2g}")  # noqa: T201 - a figure for the README
        assert error < self.logprob_bound

    def test_a_known_context_is_cached_until_an_update(
        self, engine: Engine, runner: asyncio.Runner, reference: TransformersReference, restore_weights: None
    ) -> None:
        """The prefix cache serves a repeated context, and a weight update empties it."""
        request = simple_request("p", np.arange(100) % VOCAB_SIZE, max_tokens=4, temperature=0.0)

        async def scenario() -> list[int]:
            # Contexts of other tests may share the first tokens.
            await engine.update_weights(reference.weights(variant=0), 0)
            counts = [(await engine.generate(request)).num_cached_tokens for _ in range(2)]
            await engine.update_weights(reference.weights(variant=1), 1)
            return [*counts, (await engine.generate(request)).num_cached_tokens]

        assert [0, self.num_cached_of_100, 0] == runner.run(scenario())

    def test_a_stop_string_ends_a_turn(self, engine: Engine, runner: asyncio.Runner, model_path: Path) -> None:
        """The ids that spell the stop string stay in the output, and the string is the stop reason."""
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        free = runner.run(engine.generate(numbered_request(3, temperature=0.0, max_tokens=64)))
        texts = [tokenizer.decode([each]) for each in free.token_ids]
        stop = next(text for text in texts[10:] if text.strip() and texts.index(text) >= 5)

        stopping = numbered_request(3, temperature=0.0, max_tokens=64, stop=(stop,))
        result = runner.run(engine.generate(stopping))

        assert engine.capabilities.stop_strings
        assert (FinishReason.STOP, stop) == (result.finish_reason, result.stop_reason)
        assert free.token_ids[: len(result.token_ids)].tolist() == result.token_ids.tolist()
        assert stop in tokenizer.decode(result.token_ids)
        assert stop not in tokenizer.decode(result.token_ids[:-1])

    def test_ids_outside_the_vocabulary_are_refused(self, engine: Engine, runner: asyncio.Runner) -> None:
        """The wrapped engine would crash on them; after the refusal it still serves."""
        with pytest.raises(EngineError, match=f"ids outside the vocabulary of {VOCAB_SIZE}"):
            runner.run(engine.generate(simple_request("b", [VOCAB_SIZE])))
        assert 32 == len(runner.run(engine.generate(numbered_request(1))).token_ids)

    def test_updates_under_load(self, engine: Engine, runner: asyncio.Runner, reference: TransformersReference) -> None:
        """In 100 updates under load, every token comes from the weights of the version it claims."""
        probe = EngineProbe(
            vocab_size=VOCAB_SIZE,
            num_long_tokens=100,
            reference=reference,
            logprob_bound=self.logprob_bound,
            timeout_s=300.0,
        )

        figures = runner.run(updates_under_load(engine, probe, num_updates=NUM_UPDATES))

        print(figures)  # noqa: T201 - figures for the README
        figures.expect_right()
        assert 0 == engine.stats()["num_running"]
        assert figures.num_right_before < 0.5 * figures.num_tokens_before
        assert figures.num_mixed > figures.num_answers / 2
        assert figures.num_versions > 0.9 * NUM_UPDATES

    def test_a_partial_update_keeps_the_other_weights(
        self, engine: Engine, runner: asyncio.Runner, reference: TransformersReference, restore_weights: None
    ) -> None:
        """Weights that an update does not send keep their values."""
        import torch

        part = [(name, weight) for name, weight in reference.weights(variant=3) if self.partial_update in name]
        request = numbered_request(4)

        async def scenario() -> GenerateResult:
            await engine.update_weights(part, 3)
            return await engine.generate(request)

        result = runner.run(scenario())
        mixed = copy.deepcopy(reference.model(variant=0))
        mixed.load_state_dict({name: torch.from_numpy(weight) for name, weight in part}, strict=False)
        assert part
        assert 3 == result.weight_version
        self.assert_logprobs(mixed, request, result)
