"""
What travels between a worker and a replica: many requests, or many results, as one message of columns.

A request carries only the tokens that its replica does not hold yet; token ids and log-probabilities of a message are
one array each. Nothing here knows Ray, or how a message is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from turnwise.layout import Layout
from turnwise.protocols import ReplicaLoad
from turnwise.types import FinishReason, FloatArray, GenerateRequest, GenerateResult, SamplingParams, TokenArray

_REASONS = tuple(FinishReason)


@frozen(kw_only=True, eq=False)
class ToReplica:
    """
    One message of a worker.

    Attributes:
        request_ids: n of them, and so on; `token_ids` holds the new tokens of all requests end to end.
        num_known: (n,) tokens of the context that the replica holds already.
        num_new: (n,) tokens of `token_ids` that belong to each request.
        sampling: the different parameters, without seeds and limits.
        sampling_index: (n,) which of them each request has.
        layouts: (n,) of the whole contexts; they are a few ints for each path.
        aborted: request ids to end early.
        cancelled: request ids that nobody waits for any more.
        released: trajectory ids that have ended.
    """

    request_ids: tuple[str, ...] = ()
    trajectory_ids: tuple[str, ...] = ()
    group_ids: tuple[str, ...] = ()
    num_known: NDArray[np.int32] = field(factory=lambda: np.empty(0, np.int32))
    num_new: NDArray[np.int32] = field(factory=lambda: np.empty(0, np.int32))
    token_ids: TokenArray = field(factory=lambda: np.empty(0, np.int32))
    sampling: tuple[SamplingParams, ...] = ()
    sampling_index: tuple[int, ...] = ()
    layouts: tuple[Layout | None, ...] = ()
    seeds: tuple[int | None, ...] = ()
    max_tokens: tuple[int | None, ...] = ()
    aborted: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    released: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the token columns: what grows with the length of turns."""
        return self.token_ids.nbytes + self.num_known.nbytes + self.num_new.nbytes


def pack_requests(
    requests: Sequence[tuple[GenerateRequest, int]],
    *,
    aborted: Iterable[str] = (),
    cancelled: Iterable[str] = (),
    released: Iterable[str] = (),
) -> ToReplica:
    """Pack (request, number of tokens that the replica holds) pairs and the ids that go with them."""
    different: dict[SamplingParams, int] = {}
    index = tuple(
        different.setdefault(request.sampling.with_(seed=None, max_tokens=None), len(different))
        for request, _known in requests
    )
    pieces = [request.token_ids[known:] for request, known in requests]
    return ToReplica(
        request_ids=tuple(request.request_id for request, _known in requests),
        trajectory_ids=tuple(request.trajectory_id for request, _known in requests),
        group_ids=tuple(request.group_id for request, _known in requests),
        num_known=np.array([known for _request, known in requests], np.int32),
        num_new=np.array([len(piece) for piece in pieces], np.int32),
        token_ids=np.concatenate(pieces) if pieces else np.empty(0, np.int32),
        sampling=tuple(different),
        sampling_index=index,
        layouts=tuple(request.layout for request, _known in requests),
        seeds=tuple(request.sampling.seed for request, _known in requests),
        max_tokens=tuple(request.sampling.max_tokens for request, _known in requests),
        aborted=tuple(aborted),
        cancelled=tuple(cancelled),
        released=tuple(released),
    )


@frozen(kw_only=True, eq=False)
class UnpackedRequest:
    """One request of a message: its new tokens, and how many come before them."""

    request_id: str
    trajectory_id: str
    group_id: str
    num_known: int
    new_ids: TokenArray
    sampling: SamplingParams
    layout: Layout | None = None


def unpack_requests(message: ToReplica) -> Iterator[UnpackedRequest]:
    """Yield the requests of a message."""
    stops = np.cumsum(message.num_new).tolist()
    start = 0
    for i, stop in enumerate(stops):
        sampling = message.sampling[message.sampling_index[i]]
        yield UnpackedRequest(
            request_id=message.request_ids[i],
            trajectory_id=message.trajectory_ids[i],
            group_id=message.group_ids[i],
            num_known=int(message.num_known[i]),
            new_ids=message.token_ids[start:stop],
            sampling=sampling.with_(seed=message.seeds[i], max_tokens=message.max_tokens[i]),
            layout=message.layouts[i],
        )
        start = stop


@frozen(kw_only=True, eq=False)
class ToWorker:
    """
    One message of a replica.

    Attributes:
        request_ids: n of them, and so on; `token_ids` and `logprobs` hold all results end to end.
        num_new: (n,) tokens of each result.
        versions: per result one weight version, or one for each of its tokens.
        unknown: request ids whose context the replica does not hold: send it whole.
        failed: (request id, error class, text) of requests that the engine refused.
        num_queued: requests that had to wait for a place in the engine since the last message.
        load: what the replica has to do after this message.
    """

    request_ids: tuple[str, ...] = ()
    num_new: NDArray[np.int32] = field(factory=lambda: np.empty(0, np.int32))
    token_ids: TokenArray = field(factory=lambda: np.empty(0, np.int32))
    logprobs: FloatArray = field(factory=lambda: np.empty(0, np.float32))
    reasons: bytes = b""
    stops: tuple[int | str | None, ...] = ()
    versions: tuple[int | TokenArray, ...] = ()
    num_cached: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()
    failed: tuple[tuple[str, str, str], ...] = ()
    num_queued: int = 0
    load: ReplicaLoad = field(factory=ReplicaLoad)

    @property
    def num_bytes(self) -> int:
        """Bytes of the token columns."""
        return self.token_ids.nbytes + self.logprobs.nbytes + self.num_new.nbytes


def pack_results(
    results: Sequence[tuple[str, GenerateResult]],
    *,
    unknown: Iterable[str] = (),
    failed: Iterable[tuple[str, str, str]] = (),
    num_queued: int = 0,
    load: ReplicaLoad,
) -> ToWorker:
    """Pack (request id, result) pairs and what else a worker must know."""
    answers = [result for _id, result in results]
    return ToWorker(
        request_ids=tuple(request_id for request_id, _result in results),
        num_new=np.array([len(result.token_ids) for result in answers], np.int32),
        token_ids=np.concatenate([r.token_ids for r in answers]) if answers else np.empty(0, np.int32),
        logprobs=np.concatenate([r.logprobs for r in answers]) if answers else np.empty(0, np.float32),
        reasons=bytes(_REASONS.index(result.finish_reason) for result in answers),
        stops=tuple(result.stop_reason for result in answers),
        versions=tuple(result.weight_version for result in answers),
        num_cached=tuple(result.num_cached_tokens for result in answers),
        unknown=tuple(unknown),
        failed=tuple(failed),
        num_queued=num_queued,
        load=load,
    )


def unpack_results(message: ToWorker, replica: int = 0) -> Iterator[tuple[str, GenerateResult]]:
    """Yield the (request id, result) pairs of a message that came from the replica with this index."""
    stops = np.cumsum(message.num_new).tolist()
    start = 0
    for i, stop in enumerate(stops):
        yield (
            message.request_ids[i],
            GenerateResult(
                token_ids=message.token_ids[start:stop],
                logprobs=message.logprobs[start:stop],
                finish_reason=_REASONS[message.reasons[i]],
                stop_reason=message.stops[i],
                weight_version=message.versions[i],
                num_cached_tokens=message.num_cached[i],
                replica=replica,
            ),
        )
        start = stop
