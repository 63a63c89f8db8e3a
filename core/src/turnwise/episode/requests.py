"""Names and seeds of an episode's requests, and turns that an interrupt splits into two requests."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np
from attrs import evolve, frozen

from turnwise.episode.setup import Limits
from turnwise.errors import BudgetExhausted, ConfigError
from turnwise.record.column_specs import NO_COLUMNS, ColumnSpec
from turnwise.record.limit import AGENT_TURN, SAMPLED, TURN, VALIDATION_TURN, Room
from turnwise.record.open_columns import check_same, drop_last, join_columns, specs_of
from turnwise.record.spec import EpisodeSpec
from turnwise.record.step_results import Counters, RecordedTurn, TurnPosition
from turnwise.types import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Grammar,
    SamplingParams,
    TokenArray,
)

OnCut = Callable[[GenerateResult], object]
"""Called with what the engine has sampled for a call that is cancelled."""


class SamplingEpisode(Protocol):
    """The part of a live episode that bounds its turns."""

    spec: EpisodeSpec
    limits: Limits
    counters: Counters


@frozen
class TurnOptions:
    """Options of one turn; see `turnwise.protocols.Episode.sample`."""

    sampling: SamplingParams
    max_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    on_tokens: Callable[[Sequence[int]], object] | None = None
    on_cut: OnCut | None = None
    grammar: str | None = None

    def narrow(self, room: Room, episode: SamplingEpisode) -> Room:
        """Return the room of the turn of an episode in a record that has a room."""
        spec, limit = episode.spec, episode.limits.max_sampled_tokens
        if limit is not None and (left := limit - episode.counters.num_sampled_tokens) < room.num_tokens:
            room = Room(left, SAMPLED, limit)
        if (most := self.sampling.max_tokens) is not None and most < room.num_tokens:
            of_run = most == spec.sampling.max_tokens
            room = Room(most, (VALIDATION_TURN if spec.validation else TURN) if of_run else AGENT_TURN, most)
        if self.max_tokens is not None and self.max_tokens < room.num_tokens:
            room = Room(self.max_tokens, AGENT_TURN, self.max_tokens)
        return room

    def bound(self, room: Room, seed: int, engine: Capabilities) -> SamplingParams:
        """
        Return the sampling parameters of a turn that has a room.

        Raises:
            BudgetExhausted: no token fits.
            ConfigError: the engine does not know an option, or has no stop strings or grammars.
        """
        engine.check_extra(self.sampling)
        # An engine may ignore an option that it does not support.
        if self.stop and not engine.stop_strings:
            raise ConfigError("stop strings need an engine with the capability stop_strings")
        if self.grammar is not None and not engine.grammars:
            raise ConfigError("a turn with a grammar needs an engine with the capability grammars")
        if room.num_tokens < 1:
            text = "no token was left for a turn of the model"
            raise BudgetExhausted(text, limit=room.limit, value=room.value)
        return self.sampling.with_(
            max_tokens=room.num_tokens,
            stop_token_ids=tuple(dict.fromkeys((*self.sampling.stop_token_ids, *self.stop_token_ids))),
            stop=tuple(dict.fromkeys((*self.sampling.stop, *self.stop))),
            seed=seed,
        )


def name_record(key: str, position: TurnPosition) -> str:
    """Return an episode's key; the names of further records and of paths continue it after a slash."""
    # Routers and replicas recognize the episode by the part before the slash, and release all its contexts by it.
    record, num_tokens, path, _ = position
    if path >= 0:
        return f"{key}/{record - 1}.{num_tokens}.{path}"
    return f"{key}/{record - 1}" if record > 1 else key


async def request_turn(
    request: GenerateRequest,
    position: TurnPosition,
    saved: RecordedTurn | None,
    send: Callable[[GenerateRequest], Awaitable[GenerateResult]],
    columns: Mapping[str, ColumnSpec] = NO_COLUMNS,
) -> RecordedTurn:
    """Sample a turn, or the rest of a saved one, whose open columns are declared."""
    started = time.perf_counter()
    if saved is None:
        result, seconds, specs = await send(request), 0.0, columns
    else:
        rest = continue_request(request, saved.result)
        if rest is not None:
            check_same(saved.specs, columns)
        sampled = None if rest is None else await send(rest)
        result, seconds = join_turn(saved.result, sampled, request, columns), saved.seconds
        specs = {**columns, **saved.specs}
    return RecordedTurn(
        position=position,
        result=result,
        seconds=seconds + time.perf_counter() - started,
        is_constrained=request.grammar is not None,
        specs=specs_of(result, specs),
    )


def continue_request(request: GenerateRequest, saved: GenerateResult) -> GenerateRequest | None:
    """Return the request for the rest of an interrupted turn, which has no listener, or None if nothing is left."""
    limit, ids = request.sampling.max_tokens, saved.token_ids
    ended = len(ids) > 0 and int(ids[-1]) in request.sampling.stop_token_ids
    if ended or (limit is not None and len(ids) >= limit):
        return None
    if len(ids) == 0:
        return request
    seed = request.sampling.seed
    sampling = request.sampling.with_(
        max_tokens=None if limit is None else limit - len(ids),
        # The first part has used the draws of the request's own seed: with it, the rest would repeat them.
        seed=None if seed is None else (seed + 2_654_435_761 * len(ids)) % 2**31,
    )
    grammar = request.grammar and Grammar(text=request.grammar.text, num_read=len(ids))
    token_ids = np.concatenate([request.token_ids, ids])
    return evolve(request, token_ids=token_ids, sampling=sampling, on_tokens=None, grammar=grammar)


def join_turn(
    saved: GenerateResult,
    rest: GenerateResult | None,
    request: GenerateRequest,
    columns: Mapping[str, ColumnSpec] = NO_COLUMNS,
) -> GenerateResult:
    """
    Return the part of a turn before an interrupt and the result of `continue_request` as the result of its request.

    Each token keeps its log-probability and weight version. Without a `rest` nothing was left to sample.
    """
    if rest is None:
        return _end_turn(saved, request)
    return evolve(
        rest,
        token_ids=np.concatenate([saved.token_ids, rest.token_ids]),
        logprobs=np.concatenate([saved.logprobs, rest.logprobs]),
        weight_version=_join_versions(saved, rest),
        num_cached_tokens=saved.num_cached_tokens + rest.num_cached_tokens,
        columns=join_columns(saved, rest, columns),
    )


def without_last_token(result: GenerateResult) -> GenerateResult:
    """Return a result without its last token."""
    versions = result.weight_version
    return evolve(
        result,
        token_ids=result.token_ids[:-1],
        logprobs=result.logprobs[:-1],
        weight_version=versions if isinstance(versions, int) else versions[:-1],
        columns=drop_last(result),
    )


def choose_seed(
    spec: EpisodeSpec, position: TurnPosition, record: str | int, num_unappended: int, given: int | None
) -> int:
    """Return the seed of a turn: its own, or a given one, although that makes the rollouts of a group equal."""
    if given is None:
        return derive_seed(spec, position, record, num_unappended)
    return (given + num_unappended) % 2**31


def derive_seed(spec: EpisodeSpec, position: TurnPosition, record: str | int, num_unappended: int = 0) -> int:
    """Return the seed of a turn, another one after each sample of the same turn that was not appended."""
    # From names alone: results must depend neither on time nor on the order in which requests arrive.
    place = (record, *position[1:])
    again = f"|{num_unappended}" if num_unappended else ""
    name = f"{spec.seed}|{spec.global_step}|{spec.validation}|{spec.uid}|{place}{again}"
    # 31 bits: a valid seed for every engine, whether it reads 32 bits signed or unsigned.
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") >> 1


def _end_turn(saved: GenerateResult, request: GenerateRequest) -> GenerateResult:
    """Return a turn that was complete when it was interrupted, with its real finish reason."""
    last = int(saved.token_ids[-1])
    if last in request.sampling.stop_token_ids:
        return evolve(saved, finish_reason=FinishReason.STOP, stop_reason=last)
    return evolve(saved, finish_reason=FinishReason.LENGTH)


def _join_versions(saved: GenerateResult, rest: GenerateResult) -> int | TokenArray:
    parts = [part for part in (saved, rest) if len(part.token_ids)]
    versions = [np.broadcast_to(np.asarray(part.weight_version, np.int32), len(part.token_ids)) for part in parts]
    if not versions:
        return rest.weight_version
    merged = np.concatenate(versions)
    # One int if there was no update in between, as engines return it: an array costs memory for each token.
    return int(merged[0]) if bool((merged == merged[0]).all()) else merged
