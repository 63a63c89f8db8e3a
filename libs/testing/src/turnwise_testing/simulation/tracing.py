"""
A fake engine whose log-probabilities prove the context and the weights of each token.

A log-probability is a hash of all that the token was sampled from: the ids and positions that it sees, the token and
the weights. `check_record` computes the hashes again from the record. So it finds, with near certainty, a token that
was sampled after another prefix, under another layout, or from other weights than its version claims.
Tokens depend on the context and on the request's seed alone: never on time, order, weights or cuts of a turn.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from zlib import crc32

import numpy as np
from attrs import define, field, frozen

from turnwise.layout import Layout, Objective
from turnwise.record.columns import Origin
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.types import FloatArray, GenerateRequest, TokenArray
from turnwise_testing.engines.scripted import ScriptedEngine

SEED_STRIDE: Final = 2_654_435_761
"""The core adds this to the seed for each token of a turn that an interrupt has cut, so a cut changes no token."""
_PAIR: Final = struct.Struct("<ii")
_MIX: Final = struct.Struct("<qq")


@frozen(kw_only=True)
class TracingPolicy:
    """
    Samples each token from the context before it and the request's seed.

    Attributes:
        vocab_size: ids are in 0..vocab_size-1.
        end_token_id: sampled with probability 1 / `mean_tokens`; it ends the turn if it is a stop id.
        special: other ids that are sampled with probability `special_rate`, such as the tag that opens a block.
    """

    vocab_size: int = 256
    end_token_id: int = 255
    mean_tokens: float = 6.0
    special: tuple[int, ...] = ()
    special_rate: float = 0.0

    def sample(self, request: GenerateRequest, num_tokens: int) -> TokenArray:
        """Return at most (num_tokens,) int32 ids, up to the first stop id."""
        state, position = _hash_context(request.token_ids, request.layout)
        seed, stops, ids = request.sampling.seed or 0, request.sampling.stop_token_ids, []
        for offset in range(num_tokens):
            token = self._choose(state, (seed + SEED_STRIDE * offset) % 2**31)
            ids.append(token)
            if token in stops:
                break
            state = crc32(_PAIR.pack(token, position + offset), state)
        return np.array(ids, np.int32)

    def _choose(self, state: int, seed: int) -> int:
        drawn = crc32(_MIX.pack(state, seed)) * SEED_STRIDE % 2**32
        uniform, rest = (drawn >> 16) / 2**16, drawn & 0xFFFF
        if uniform < 1 / self.mean_tokens:
            return self.end_token_id
        if self.special and uniform > 1 - self.special_rate:
            return self.special[rest % len(self.special)]
        return rest % self.vocab_size


def _hash_context(token_ids: TokenArray, layout: Layout | None) -> tuple[int, int]:
    """Return the hash of the (T,) ids that a new token sees with their positions, and the new token's position."""
    positions = np.arange(len(token_ids), dtype=np.int32) if layout is None else layout.columns(len(token_ids))[0]
    return crc32(_pairs(token_ids, positions)), int(positions.max(initial=-1)) + 1


def _pairs(token_ids: TokenArray, positions: TokenArray) -> bytes:
    return np.stack([token_ids, positions], axis=1).astype("<i4").tobytes()


def _logprob(state: int, token: int, weights: int) -> float:
    """Return a value in (-1, 0) that float32 holds exactly."""
    return -(1 + (crc32(_MIX.pack(token, weights), state) & 0xFFFF)) / 2**17


def digest_of(weights: Mapping[str, object]) -> int:
    """Return the hash of all weights of an engine, by name."""
    digest = 0
    for name in sorted(weights):
        digest = crc32(np.ascontiguousarray(weights[name]).tobytes(), crc32(name.encode(), digest))
    return digest


@define(eq=False)
class TracingEngine(ScriptedEngine):
    """
    A scripted engine with traced log-probabilities and real weights.

    Attributes:
        weights: arrays by name; an update replaces its names.
        update_s: returns the seconds before an update is visible; called for each update.
    """

    policy: Any = field(factory=TracingPolicy, kw_only=True)
    weights: dict[str, Any] = field(factory=dict, kw_only=True)
    update_s: Callable[[], float] = field(default=lambda: 0.0, kw_only=True)
    _digests: dict[int, int] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._digests[0] = digest_of(self.weights)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Read the weights, and serve them with their version from the end of the update on."""
        changed = {name: np.array(array) for name, array in weights}
        if seconds := self.update_s():
            await asyncio.sleep(seconds)
        self.weights |= changed
        self._digests[version] = digest_of(self.weights)
        await super().update_weights(iter(()), version)

    def _logprobs(self, request: GenerateRequest, ids: TokenArray, versions: int | TokenArray) -> FloatArray:
        state, position = _hash_context(request.token_ids, request.layout)
        logprobs = []
        for offset, (token, version) in enumerate(zip(ids.tolist(), np.broadcast_to(versions, len(ids)), strict=True)):
            logprobs.append(_logprob(state, token, self._digests[int(version)]))
            state = crc32(_PAIR.pack(token, position + offset), state)
        return np.array(logprobs, np.float32)


def check_record(record: Trajectory, objective: Objective, digests: Mapping[int, int]) -> None:
    """
    Raise `AssertionError` for a sampled or replayed token whose context or weights differ from its record's.

    Args:
        record: of an episode that a `TracingEngine` sampled.
        objective: of the episode.
        digests: `digest_of` the weights of each version.
    """
    start = record.num_prompt_tokens
    for index, state in _states(record, objective):
        if index < start or not Origin(record.origins[index - start]).is_sampled:
            continue
        token, version = int(record.input_ids[index]), int(record.weight_versions[index - start])
        found = float(record.logprobs[index - start])
        if found == np.float32(_logprob(state, token, digests[version])):
            continue
        fitting = [each for each, weights in digests.items() if found == np.float32(_logprob(state, token, weights))]
        reason = (
            f"it claims version {version} and was sampled from version {fitting[0]}"
            if fitting
            else "it was sampled after other tokens than its record has"
        )
        raise AssertionError(f"token {index} of {len(record)} (id {token}): {reason}")


def check_episode(result: EpisodeResult, digests: Mapping[int, int]) -> None:
    """Check each record of an episode; see `check_record`."""
    for number, record in enumerate(result.trajectories):
        try:
            check_record(record, result.objective, digests)
        except AssertionError as error:
            raise AssertionError(f"episode {result.uid}, record {number}: {error}") from None


def _states(record: Trajectory, objective: Objective) -> Iterator[tuple[int, int]]:
    """Yield the index of each token with the hash of the tokens that it sees."""
    ids, blocks, paths = record.input_ids.tolist(), record.block_start, record.path_start
    exact = objective is Objective.EXACT
    positions = record.position_ids if exact else np.arange(len(ids))
    main, own = 0, 0
    at_block: dict[int, int] = {}
    for index, token in enumerate(ids):
        if paths[index]:  # a path continues the hash of the tokens before its block
            block = int(blocks[index])
            at_block.setdefault(block, main)
            own = at_block[block] if index == paths[index] else own
            # In text that a path sees without its siblings, its first token follows the block's start.
            position = int(positions[index]) if exact else block + index - int(paths[index])
            yield index, own
            own = crc32(_PAIR.pack(token, position), own)
        else:
            yield index, main
        main = crc32(_PAIR.pack(token, int(positions[index])), main)
