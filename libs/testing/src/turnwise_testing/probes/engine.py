"""The probe of engine checks, and assertions that also work under `python -O`. Nothing here knows pytest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from attrs import field, frozen, validators

from turnwise.errors import EngineError
from turnwise.protocols import Engine
from turnwise.types import FloatArray, GenerateRequest, GenerateResult, SamplingParams
from turnwise_testing.probes.pictures import PictureProbe

T = TypeVar("T")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
"""The request of most checks: eight tokens that every engine samples the same way each time."""
_numbers = count()
_LOOKS: Final = 50
"""Looks without a pause."""


class Reference(Protocol):
    """
    The model that an engine holds, as a plain forward pass in float32, and the same with other weights.

    `variant` 0 has the weights that the engine starts with; every other number has different weights.
    `TransformersReference` is one.
    """

    def weights(self, *, variant: int) -> Iterable[tuple[str, Any]]:
        """Return the whole state dict, as `Engine.update_weights` takes it."""

    def scores(
        self, token_ids: Sequence[int], num_context: int, *, temperature: float, variant: int
    ) -> tuple[FloatArray, FloatArray]:
        """
        Score the ids after the first `num_context`.

        Returns:
            (n,) log-probability of each id, and (n,) of the most likely one in its place, both after temperature.
        """


@frozen(kw_only=True)
class Letters:
    """
    Short texts for grammars.

    Attributes:
        ids: at least two texts that do not begin like each other, with the only id that writes each.
        end_id: an id that ends turns.
        decode: returns the text of ids.
    """

    ids: Mapping[str, int]
    end_id: int
    decode: Callable[[Any], str]


def letters_of(directory: Path, texts: Iterable[str] = ("a", "b", "7")) -> Letters:
    """
    Return the letters of a model directory, by its tokenizer. Needs transformers.

    Args:
        directory: of the model.
        texts: each must be one token.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    ids = {}
    for text in texts:
        (ids[text],) = tokenizer.encode(text, add_special_tokens=False)
    return Letters(ids=ids, end_id=tokenizer.eos_token_id, decode=tokenizer.decode)


@frozen(kw_only=True)
class EngineProbe:
    """
    The probe of an engine.

    Attributes:
        vocab_size: bound of all ids.
        prompts: contexts; eight short ones, of different lengths, unless given.
        num_long_tokens: output of a request that can still be caught in flight.
        num_concurrent: how many requests are sent at once.
        num_updates: how many weight updates come while requests run.
        weights: makes a valid argument of `update_weights`; none changes nothing.
        timeout_s: longest wait for one request.
        reference: the model's own scores; without it checks that compare with it are skipped.
        logprob_bound: largest difference to the reference, in nats; a suite's own `logprob_bound` goes first.
        letters: for the checks of grammars, which are skipped without them.
        pictures: for the checks of pictures, likewise.
        measured: measurements of checks by name, such as `logprob_error`.
    """

    vocab_size: int = field(validator=validators.ge(1))
    prompts: tuple[tuple[int, ...], ...] = field()
    num_long_tokens: int = 64
    num_concurrent: int = 32
    num_updates: int = 10
    weights: Callable[[], Iterable[tuple[str, Any]]] = tuple
    timeout_s: float = 60.0
    reference: Reference | None = None
    logprob_bound: float = 1e-3
    letters: Letters | None = None
    pictures: PictureProbe | None = None
    measured: dict[str, float] = field(factory=dict, eq=False)

    @prompts.default
    def _spread(self) -> tuple[tuple[int, ...], ...]:
        vocab_size = max(self.vocab_size, 1)
        return tuple(tuple((7 * i + 3 * j + 1) % vocab_size for j in range(4 + i)) for i in range(8))

    def request(self, prompt: int = 0, sampling: SamplingParams = GREEDY) -> GenerateRequest:
        """Return a request with a new id for one of the prompts."""
        return make_request(f"check-{next(_numbers)}", self.prompts[prompt % len(self.prompts)], sampling)

    def prefix_request(self, sampling: SamplingParams = GREEDY) -> GenerateRequest:
        """Return a request with a context long enough to be found in a prefix cache."""
        context = (i * i % self.vocab_size for i in range(1, 97))
        return make_request(f"check-{next(_numbers)}", context, sampling)

    def long_request(self) -> GenerateRequest:
        """Return a greedy request that samples for a while."""
        return self.request(sampling=GREEDY.with_(max_tokens=self.num_long_tokens))

    async def ask(self, engine: Engine, request: GenerateRequest) -> GenerateResult:
        """Return the engine's answer; an `AssertionError` when none comes in time."""
        return await self.within(engine.generate(request), f"request {request.request_id!r}")

    async def ask_together(self, engine: Engine, requests: Iterable[GenerateRequest]) -> list[GenerateResult]:
        """Return the answers to requests sent at once, in their order."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.ask(engine, request)) for request in requests]
        return [task.result() for task in tasks]

    async def within(self, awaitable: Awaitable[T], subject: str) -> T:
        """Wait for something, but not forever."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await awaitable
        except TimeoutError:
            raise AssertionError(f"{subject} took more than {self.timeout_s} s") from None

    async def settles(self, engine: Engine, num_running: int) -> None:
        """Wait until this many requests run; an `AssertionError` when it does not come to that."""
        await self.within(_poll(engine, num_running), f"num_running to become {num_running}")


def make_request(request_id: str, token_ids: Iterable[int], sampling: SamplingParams) -> GenerateRequest:
    """Return a request that is its own trajectory."""
    ids = np.array(tuple(token_ids), np.int32)
    return GenerateRequest(request_id=request_id, trajectory_id=request_id, token_ids=ids, sampling=sampling)


async def _poll(engine: Engine, num_running: int) -> None:
    # On a busy machine a fast engine can answer within one pause, so the first looks come at each pass of the loop: a
    # request counts from its first step, and its answer needs a later pass.
    pauses = chain(repeat(0.0, _LOOKS), repeat(0.002))
    while engine.stats()["num_running"] != num_running:  # noqa: ASYNC110 - an engine has no event for it
        await asyncio.sleep(next(pauses))


def expect(condition: bool | np.bool_, text: str) -> None:
    """Raise `AssertionError` with the text unless the condition holds."""
    if not condition:
        raise AssertionError(text)


def expect_equal(actual: object, expected: object, subject: str) -> None:
    """Raise `AssertionError` that shows both values unless they are equal."""
    expect(actual == expected, f"{subject}: expected {expected!r}, got {actual!r}")


async def expect_refusal(awaitable: Awaitable[object], subject: str, says: str = "") -> None:
    """Raise `AssertionError` unless awaiting raises `EngineError` with a text that holds `says`."""
    try:
        result = await awaitable
    except EngineError as error:
        expect(says in str(error), f"{subject}: expected an EngineError that says {says!r}, got {error}")
        return
    raise AssertionError(f"{subject}: expected an EngineError, got {result!r}")
