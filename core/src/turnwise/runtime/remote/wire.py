"""
Wire format between workers and replicas: many requests, or many results, as one message of columns.

A request contains only the tokens that its replica does not hold yet. A message has one array for all token ids, and
one for all log-probabilities. This module does not depend on Ray, or on how a message is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from turnwise.errors import AsleepError, EngineError, GrammarError, TurnwiseError
from turnwise.layout import Layout
from turnwise.media import Picture, PictureName
from turnwise.protocols import ReplicaLoad
from turnwise.runtime.remote.contexts import ProvedPrefix
from turnwise.types import (
    Array,
    FinishReason,
    FloatArray,
    GenerateRequest,
    GenerateResult,
    Grammar,
    SamplingParams,
    TokenArray,
)

_REASONS = tuple(FinishReason)
_KEPT_ERRORS: Final = {each.__name__: each for each in (AsleepError, EngineError, GrammarError)}
"""The errors of a request that keep their class on the way from a replica to a worker, by name."""


def name_error(error: BaseException) -> str:
    """Return the class by which `read_error` makes an error again."""
    known = isinstance(error, TurnwiseError) and not isinstance(error, AsleepError | GrammarError)
    return EngineError.__name__ if known else type(error).__name__


def read_error(name: str, text: str) -> EngineError:
    """Return the error with this text; the text begins with the name of a class that is no error of an engine."""
    known = _KEPT_ERRORS.get(name)
    return EngineError(f"{name}: {text}") if known is None else known(text)


@frozen(kw_only=True, eq=False)
class ToReplica:
    """
    One message of a worker, with n requests.

    Attributes:
        request_ids: n ids; the other columns are in the same order.
        num_known: (n,) tokens of each context that the replica holds already.
        proofs: n hashes of these tokens, by which the replica checks that it holds them.
        num_new: (n,) tokens of `token_ids` that belong to each request.
        token_ids: the new tokens of all requests, concatenated.
        sampling: distinct parameters, without seeds and limits.
        sampling_index: (n,) index into `sampling` of each request.
        layouts: (n,) of the whole contexts; they are a few ints for each path.
        grammars: (n,) of the turns.
        cancelled: ids of requests without a waiting task.
        released: ids of trajectories that have ended.
        suspects: ids of requests that must run alone, because several replicas died with them.
        confirmed: ids of suspects that the replica may start now or whose results have arrived, and of barriers.
        streamed: ids of requests whose tokens the worker wants while they are sampled.
    """

    request_ids: tuple[str, ...] = ()
    trajectory_ids: tuple[str, ...] = ()
    group_ids: tuple[str, ...] = ()
    num_known: NDArray[np.int32] = field(factory=lambda: np.empty(0, np.int32))
    proofs: tuple[bytes, ...] = ()
    num_new: NDArray[np.int32] = field(factory=lambda: np.empty(0, np.int32))
    token_ids: TokenArray = field(factory=lambda: np.empty(0, np.int32))
    sampling: tuple[SamplingParams, ...] = ()
    sampling_index: tuple[int, ...] = ()
    layouts: tuple[Layout | None, ...] = ()
    grammars: tuple[Grammar | None, ...] = ()
    seeds: tuple[int | None, ...] = ()
    max_tokens: tuple[int | None, ...] = ()
    aborted: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    confirmed: tuple[str, ...] = ()
    streamed: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the token columns, which grow with the length of turns."""
        return self.token_ids.nbytes + self.num_known.nbytes + self.num_new.nbytes


@frozen(kw_only=True, eq=False)
class IllustratedRequests(ToReplica):
    """
    A message with pictures in some of its contexts. The replica asks for the bytes that it does not hold.

    Another class, so that a message of text alone is no larger than without pictures.

    Attributes:
        picture_names: the distinct pictures of the message.
        picture_places: (k, 4) int32: number of the request in the message, first placeholder and number of placeholders
            in the whole context, and index into `picture_names`.
    """

    picture_names: tuple[PictureName, ...]
    picture_places: NDArray[np.int32]

    @property
    def num_bytes(self) -> int:
        """Bytes of the columns of tokens and pictures."""
        return super().num_bytes + self.picture_places.nbytes


@frozen(kw_only=True, eq=False)
class WantedPictures:
    """A message of a replica: it lacks these pictures of requests of this worker."""

    names: tuple[PictureName, ...]


@frozen(kw_only=True, eq=False)
class SentPicture:
    """A message of a worker: a picture that its replica lacks. One for each, because a message has a limit of bytes."""

    picture: Picture

    @property
    def num_bytes(self) -> int:
        """Bytes of the picture."""
        return len(self.picture.data)


PlacedName = tuple[int, int, PictureName]
"""A picture in a context: its first placeholder, the number of its placeholders, and its name."""


def pack_requests(requests: Sequence[tuple[GenerateRequest, ProvedPrefix]], **ids: Iterable[str]) -> ToReplica:
    """Pack (request, prefix that the replica holds) pairs, and ids for other columns such as `aborted`."""
    # Seeds and limits differ for every request. The other parameters are mostly the same, and pickled once.
    distinct: dict[SamplingParams, int] = {}
    index = tuple(
        distinct.setdefault(request.sampling.with_(seed=None, max_tokens=None), len(distinct))
        for request, _known in requests
    )
    pieces = [request.token_ids[known.num_tokens :] for request, known in requests]
    columns = dict[str, Any](
        request_ids=tuple(request.request_id for request, _known in requests),
        trajectory_ids=tuple(request.trajectory_id for request, _known in requests),
        group_ids=tuple(request.group_id for request, _known in requests),
        num_known=np.array([known.num_tokens for _request, known in requests], np.int32),
        proofs=tuple(known.proof for _request, known in requests),
        num_new=np.array([len(piece) for piece in pieces], np.int32),
        token_ids=np.concatenate(pieces) if pieces else np.empty(0, np.int32),
        sampling=tuple(distinct),
        sampling_index=index,
        layouts=tuple(request.layout for request, _known in requests),
        grammars=tuple(request.grammar for request, _known in requests),
        seeds=tuple(request.sampling.seed for request, _known in requests),
        max_tokens=tuple(request.sampling.max_tokens for request, _known in requests),
        **{name: tuple(column) for name, column in ids.items()},
    )
    if not any(request.pictures for request, _known in requests):
        return ToReplica(**columns)
    return IllustratedRequests(**columns, **_pack_places([request for request, _known in requests]))


def _pack_places(requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """Return the columns of the pictures of requests."""
    names: dict[PictureName, int] = {}
    rows = [
        (number, each.start, each.num_tokens, names.setdefault(each.picture.name, len(names)))
        for number, request in enumerate(requests)
        for each in request.pictures
    ]
    return {"picture_names": tuple(names), "picture_places": np.array(rows, np.int32).reshape(-1, 4)}


def _unpack_places(message: ToReplica) -> dict[int, list[PlacedName]]:
    """Return the pictures of the requests of a message, by the numbers of the requests."""
    found: dict[int, list[PlacedName]] = {}
    if isinstance(message, IllustratedRequests):
        for number, start, num_tokens, index in message.picture_places.tolist():
            found.setdefault(number, []).append((start, num_tokens, message.picture_names[index]))
    return found


@frozen(kw_only=True, eq=False)
class UnpackedRequest:
    """One request of a message: its new tokens and the prefix before them, and the pictures of its whole context."""

    request_id: str
    trajectory_id: str
    group_id: str
    prefix: ProvedPrefix
    new_ids: TokenArray
    sampling: SamplingParams
    layout: Layout | None = None
    grammar: Grammar | None = None
    pictures: Sequence[PlacedName] = ()


def unpack_requests(message: ToReplica) -> Iterator[UnpackedRequest]:
    """Yield the requests of a message."""
    stops = np.cumsum(message.num_new).tolist()
    places = _unpack_places(message)
    start = 0
    for i, stop in enumerate(stops):
        sampling = message.sampling[message.sampling_index[i]]
        yield UnpackedRequest(
            request_id=message.request_ids[i],
            trajectory_id=message.trajectory_ids[i],
            group_id=message.group_ids[i],
            prefix=ProvedPrefix(int(message.num_known[i]), message.proofs[i]),
            new_ids=message.token_ids[start:stop],
            sampling=sampling.with_(seed=message.seeds[i], max_tokens=message.max_tokens[i]),
            layout=message.layouts[i],
            grammar=message.grammars[i],
            pictures=places.get(i, ()),
        )
        start = stop


@frozen(kw_only=True, eq=False)
class ToWorker:
    """
    One message of a replica, with n results.

    Attributes:
        request_ids: n ids; the other columns are in the same order.
        token_ids: the tokens of all results, concatenated.
        reasons: one byte per result: index of its `FinishReason`.
        versions: weight version of each result, or of each of its tokens.
        num_cached: tokens of each context that the engine had cached.
        columns: open columns of each result; empty when no result has any.
        unknown: ids of requests whose context the replica does not hold; the worker sends it completely.
        failed: (request id, error class, text) of requests that failed.
        granted: ids of suspects that will run next, and wait until the worker confirms.
        num_queued: requests that had to wait for the engine since the last message.
        barrier: an id that the worker confirms when it has handled the message; empty for none.
        load: of the replica after this message.
        heard: (request id, (k,) ids) of requests that are being sampled: the ids since the last message.
    """

    request_ids: tuple[str, ...] = ()
    num_new: NDArray[np.int32] = field(factory=lambda: np.empty(0, np.int32))
    token_ids: TokenArray = field(factory=lambda: np.empty(0, np.int32))
    logprobs: FloatArray = field(factory=lambda: np.empty(0, np.float32))
    reasons: bytes = b""
    stops: tuple[int | str | None, ...] = ()
    versions: tuple[int | TokenArray, ...] = ()
    num_cached: tuple[int, ...] = ()
    columns: tuple[Mapping[str, Array] | None, ...] = ()
    unknown: tuple[str, ...] = ()
    failed: tuple[tuple[str, str, str], ...] = ()
    granted: tuple[str, ...] = ()
    num_queued: int = 0
    barrier: str = ""
    load: ReplicaLoad = field(factory=ReplicaLoad)
    heard: tuple[tuple[str, TokenArray], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the token columns."""
        heard = sum(ids.nbytes for _request_id, ids in self.heard)
        heard += sum(values.nbytes for columns in self.columns if columns for values in columns.values())
        return self.token_ids.nbytes + self.logprobs.nbytes + self.num_new.nbytes + heard


def pack_results(
    results: Sequence[tuple[str, GenerateResult]],
    *,
    failed: Iterable[tuple[str, str, str]] = (),
    heard: Iterable[tuple[str, Sequence[int]]] = (),
    num_queued: int = 0,
    barrier: str = "",
    load: ReplicaLoad,
    **ids: Iterable[str],
) -> ToWorker:
    """Pack (request id, result) pairs, and values for the other columns."""
    found = [result for _id, result in results]
    return ToWorker(
        request_ids=tuple(request_id for request_id, _result in results),
        num_new=np.array([len(result.token_ids) for result in found], np.int32),
        token_ids=np.concatenate([r.token_ids for r in found]) if found else np.empty(0, np.int32),
        logprobs=np.concatenate([r.logprobs for r in found]) if found else np.empty(0, np.float32),
        reasons=bytes(_REASONS.index(result.finish_reason) for result in found),
        stops=tuple(result.stop_reason for result in found),
        versions=tuple(result.weight_version for result in found),
        num_cached=tuple(result.num_cached_tokens for result in found),
        columns=tuple(columns) if any(columns := [result.columns for result in found]) else (),
        failed=tuple(failed),
        heard=tuple((request_id, np.array(ids, np.int32)) for request_id, ids in heard),
        num_queued=num_queued,
        barrier=barrier,
        load=load,
        **{name: tuple(column) for name, column in ids.items()},
    )


def aborted_result() -> GenerateResult:
    """Return the result of a request that was aborted before an engine had it."""
    return GenerateResult(token_ids=(), logprobs=(), finish_reason=FinishReason.ABORT)


def unpack_results(message: ToWorker, replica: int = 0) -> Iterator[tuple[str, GenerateResult]]:
    """Yield the (request id, result) pairs of a message of the replica with this index."""
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
                columns=message.columns[i] if message.columns else None,
            ),
        )
        start = stop
