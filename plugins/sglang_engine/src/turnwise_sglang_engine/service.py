"""
Serves the frames of the engine in SGLang's process: requests, aborts, weight updates, sleep.

It calls SGLang's tokenizer manager, always on one event loop, and handles four cases that SGLang does not: an abort
that arrives before the request has reached the scheduler, or while its grammar is compiled; an end-of-turn id of the
model that the request did not name; and requests that arrive while weights change.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np
from attrs import define, field

from turnwise.errors import DataError
from turnwise.types import PlacedPicture
from turnwise_engine_support.error_lines import error_line
from turnwise_sglang_engine.frames import Frame
from turnwise_sglang_engine.grammars import grammar_key
from turnwise_sglang_engine.loading import check_shared_memory, make_tensors, map_file, pickle_tensors
from turnwise_sglang_engine.requests import FILTERED, GREEDY, PLAIN
from turnwise_sglang_engine.served_pictures import ServedPicture, ServedPictures

_DISPATCH_POLL_S = 0.001
_ABORTED_IN_QUEUE: Final = "Aborted by AbortReq."


class ServiceError(Exception):
    """Something cannot be done. The text is one line for the user."""


@define(eq=False)
class Turn:
    """
    A request and the output received so far.

    Attributes:
        head: head of the request's frame.
        context: (n,) ids.
        pictures: of the context.
        rid: SGLang's id. SGLang aborts by prefix, so no id is a prefix of another.
        aborted: whether to end the request with the tokens it has.
        state: the request's state in SGLang's tokenizer manager, kept when it is aborted.
        task: the task that serves the request.
        images: the pictures with their arrays, once they are read; None if there are none.
        ids: sampled ids.
        logprobs: of these ids; empty for a greedy request.
        spans: weight version, start and end of runs of these ids.
        num_cached: context tokens found in the prefix cache.
        reason: finish reason; empty while the request continues.
        stop: stop id or stop string that ended it.
        num_told: ids that the engine has heard.
        routes: int32 experts of the tokens that have run, (n, layers, top_k) as bytes; empty if they are not returned.
    """

    head: dict[str, Any]
    context: list[int]
    pictures: tuple[PlacedPicture, ...] = ()
    rid: str = ""
    aborted: bool = False
    state: Any = None
    task: asyncio.Task[None] | None = None
    images: list[ServedPicture] | None = None
    ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    spans: list[tuple[int, int, int]] = field(factory=list)
    num_cached: int = 0
    reason: str = ""
    stop: int | str | None = None
    num_told: int = 0
    routes: bytes = b""

    @property
    def options(self) -> dict[str, Any]:
        """SGLang's sampling parameters for the remaining tokens."""
        options: dict[str, Any] = self.head["options"]
        options = options | {"max_new_tokens": options["max_new_tokens"] - len(self.ids)}
        if "grammar" in self.head:
            text, num_read = self.head["grammar"]
            read = self.context[len(self.context) - num_read :] + self.ids
            options["ebnf"] = grammar_key(text, options["stop_token_ids"], read)
        return options

    def add(self, output: dict[str, Any]) -> None:
        """Add an output of SGLang. `reason` stays empty if the request must continue."""
        meta = output["meta_info"]
        ids = list(output["output_ids"])
        start = len(self.ids)
        logprobs = self._logprobs_in(meta)
        if self.head["method"] != GREEDY:
            # The output of a request aborted in a queue may have fewer log-probabilities than ids.
            ids = ids[: len(logprobs)]
            self.logprobs += logprobs[: len(ids)]
        if not self.ids:
            self.num_cached = meta.get("cached_tokens", 0)
        self.ids += ids
        # An output after another has those of all tokens again; the first ones stay.
        self.routes += base64.b64decode(meta.get("routed_experts") or "")[len(self.routes) :]
        self.spans += [
            (int(span["version"]), start + span["start"], start + min(span["end"], len(ids)))
            for span in meta.get("weight_versions") or ()
        ]
        self._end(meta["finish_reason"])

    def take_new(self, output: dict[str, Any]) -> list[int]:
        """Return the ids of an unfinished output, which has all ids so far, that were not returned before."""
        num_ids = len(output["output_ids"])
        if self.head["method"] != GREEDY:
            num_ids = min(num_ids, len(self._logprobs_in(output["meta_info"])))  # `add` drops the others
        new: list[int] = output["output_ids"][self.num_told - len(self.ids) : num_ids]
        self.num_told += len(new)
        return new

    def _logprobs_in(self, meta: dict[str, Any]) -> list[float]:
        if self.head["method"] == PLAIN:
            return [value for value, *_ in meta.get("output_token_logprobs") or ()]
        if self.head["method"] == FILTERED:
            name = "output_token_sampling_logprobs"
            return list(meta.get(name) or getattr(self.state, name, None) or [])
        return []

    def _end(self, finish: dict[str, Any]) -> None:
        matched = finish.get("matched")
        if finish["type"] == "abort" and not self.aborted:
            raise ServiceError(f"SGLang ended the request: {finish.get('message') or 'no reason given'}")
        if finish["type"] == "stop" and isinstance(matched, int) and matched not in self.options["stop_token_ids"]:
            # The model's own end of turn, which the request did not name, so the request continues after it.
            self.reason = "" if self.options["max_new_tokens"] else "length"
            return
        self.reason, self.stop = finish["type"], matched


@define(eq=False)
class Service:
    """
    Handles frames and sends replies.

    Attributes:
        manager: SGLang's tokenizer manager.
        structs: the module of SGLang's request classes.
        serialize: serializes named tensors for one rank.
        num_ranks: number of ranks.
        num_nodes: number of nodes that they are on, the first ranks on this one.
        pictures: of requests; None if the model reads none.
        group: owns the tasks.
        send: sends a frame's head and arrays.
    """

    manager: Any
    structs: Any
    serialize: Callable[[Any], bytes]
    num_ranks: int
    group: asyncio.TaskGroup
    num_nodes: int = field(default=1, kw_only=True)
    pictures: ServedPictures | None = field(default=None, kw_only=True)
    send: Callable[..., None] = field(init=False)
    _turns: dict[int, Turn] = field(factory=dict, init=False)
    _open: bool = field(default=True, init=False)
    _gate: asyncio.Condition = field(factory=asyncio.Condition, init=False)
    _switching: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _asleep: set[str] = field(factory=set, init=False)

    def receive(self, frame: Frame) -> None:
        """Start a task that handles a frame."""
        head = frame.head
        if head["op"] == "generate":
            turn = self._turns[head["id"]] = Turn(head, frame.arrays[0].tolist())
            if self.pictures is not None:
                turn.pictures = self.pictures.take(head["pictures"], frame.arrays[1:])
            turn.task = self.group.create_task(self._serve(turn))
        elif head["op"] == "cancel":
            running = self._turns.get(head["id"])
            if running is not None and running.task is not None:
                running.task.cancel()
        elif head["op"] == "abort":
            if running := self._turns.get(head["id"]):
                self.group.create_task(self._abort(running))
        else:
            self.group.create_task(self._control(head))

    async def _serve(self, turn: Turn) -> None:
        try:
            await self._sample(turn)
        except Exception as error:  # noqa: BLE001 - any error of SGLang fails only this request
            self.send({"id": turn.head["id"], "error": _error_text(error)})
            return
        finally:
            del self._turns[turn.head["id"]]
        head = {
            "id": turn.head["id"],
            "reason": turn.reason,
            "stop": turn.stop,
            "num_cached_tokens": turn.num_cached,
            "spans": turn.spans,
        }
        arrays = [np.array(turn.ids, np.int32)]
        if turn.head["method"] != GREEDY:
            arrays.append(np.array(turn.logprobs, np.float32))
        if turn.head.get("routes", False):
            arrays.append(np.frombuffer(turn.routes, np.int32))
        self.send(head, *arrays)

    async def _read_pictures(self, turn: Turn) -> None:
        if self.pictures is not None and turn.pictures:
            try:
                turn.images = await self.pictures.read(turn.context, turn.pictures)
            except DataError as error:
                raise ServiceError(str(error)) from error

    async def _sample(self, turn: Turn) -> None:
        await self._read_pictures(turn)
        while not turn.reason:
            async with self._gate:
                await self._gate.wait_for(lambda: self._open or turn.aborted)
            if turn.aborted:
                turn.reason = "abort"
                return
            # There is no await between here and SGLang's registration of the request, so `_abort` finds either no rid
            # or its state.
            turn.rid = uuid.uuid4().hex
            request = self.structs.GenerateReqInput(
                input_ids=turn.context + turn.ids,
                image_data=turn.images,
                sampling_params=turn.options,
                rid=turn.rid,
                return_logprob=turn.head["method"] == PLAIN,
                return_sampling_mask=turn.head["method"] == FILTERED,
                stream=turn.head["stream"],
                return_routed_experts=turn.head.get("routes", False),
            )
            output: dict[str, object] = {}
            try:
                async for output in self.manager.generate_request(request, None):
                    if turn.head["stream"] and (new := turn.take_new(output)):
                        self.send({"id": turn.head["id"], "is_part": True}, np.array(new, np.int32))
            except ValueError as error:
                # SGLang has an error in place of an output for a request that is aborted while its grammar is compiled.
                if not turn.aborted or str(error) != _ABORTED_IN_QUEUE:
                    raise
                turn.reason = "abort"
                return
            turn.add(output)

    async def _abort(self, turn: Turn) -> None:
        # First the flag: a turn that waits at the gate checks it when it wakes up.
        turn.aborted = True
        async with self._gate:
            self._gate.notify_all()
        # SGLang drops an abort that reaches the scheduler before the request, so wait until it was dispatched.
        while (state := self.manager.rid_to_state.get(turn.rid)) is not None:
            turn.state = state
            if state.dispatched:
                self.manager.abort_request(turn.rid)
                return
            await asyncio.sleep(_DISPATCH_POLL_S)

    async def _control(self, head: dict[str, Any]) -> None:
        reply: dict[str, object] = {"id": head["id"]}
        try:
            async with self._switching:
                if head["op"] == "update":
                    await self._update(head, reply)
                elif head["op"] == "sleep":
                    await self._sleep(set(head["tags"]))
                else:
                    await self._wake_up(set(head["tags"]))
        except Exception as error:  # noqa: BLE001 - any error of SGLang is sent to the engine
            reply["error"] = _error_text(error)
        self.send(reply)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Hold new requests back, and return running ones to the queue without their keys and values."""
        await self._pause()
        try:
            yield
        finally:
            if not self._asleep:
                await self._resume()

    async def _pause(self) -> None:
        self._open = False
        await self.manager.pause_generation(self.structs.PauseGenerationReqInput(mode="retract"))

    async def _resume(self) -> None:
        await self.manager.continue_generation(self.structs.ContinueGenerationReqInput(torch_empty_cache=False))
        self._open = True
        async with self._gate:
            self._gate.notify_all()

    async def _update(self, head: dict[str, Any], reply: dict[str, Any]) -> None:
        """Load weights during a pause. `reply` has `torn` from the moment that weights may have changed."""
        buckets = head["buckets"]
        memory = map_file(head["path"], head["size"]) if buckets else None
        check_shared_memory(buckets)
        async with self._paused():
            if memory is not None:
                await self._load_all(memory, head, reply)
            else:
                await self._change_version(head["version"])

    async def _load_all(self, memory: Any, head: dict[str, Any], reply: dict[str, Any]) -> None:
        _check(await self.manager.begin_weight_update(self.structs.BeginWeightUpdateReqInput()))
        reply["torn"] = True
        try:
            for number, bucket in enumerate(head["buckets"], start=1):
                version = head["version"] if number == len(head["buckets"]) else None
                await self._load(make_tensors(memory, bucket), version)
        finally:
            # After a failure too, or the next update would find the session open.
            ended = await self.manager.end_weight_update(self.structs.EndWeightUpdateReqInput())
        _check(ended)
        reply["torn"] = False

    async def _load(self, tensors: list[tuple[str, Any]], version: int | None) -> None:
        """Load one bucket. The last one sets the version and flushes the cache."""
        request = self.structs.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=self._payloads(tensors),
            flush_cache=version is not None,
            weight_version=None if version is None else str(version),
        )
        _check(await self.manager.update_weights_from_tensor(request))

    def _payloads(self, tensors: list[tuple[str, Any]]) -> list[bytes]:
        """Return the tensors for each rank: in shared memory for those on this node, within the message for others."""
        num_local = self.num_ranks // self.num_nodes
        payloads = [self.serialize(tensors) for _ in range(num_local)]
        if self.num_nodes > 1:
            payloads += [pickle_tensors(tensors)] * (self.num_ranks - num_local)
        return payloads

    async def _change_version(self, version: int) -> None:
        request = self.structs.UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        await self.manager.update_weight_version(request)
        flushed = await self.manager.flush_cache()
        _check((flushed.success, flushed.message))

    async def _sleep(self, tags: set[str]) -> None:
        """Free memory. SGLang's scheduler crashes unless it is idle or paused, so it stays paused."""
        if tags := tags - self._asleep:
            if not self._asleep:
                await self._pause()
            request = self.structs.ReleaseMemoryOccupationReqInput(tags=sorted(tags))
            await self.manager.release_memory_occupation(request)
            self._asleep |= tags

    async def _wake_up(self, tags: set[str]) -> None:
        """Restore memory. SGLang's scheduler crashes on a tag that is awake, so those are left out."""
        if tags := tags & self._asleep:
            request = self.structs.ResumeMemoryOccupationReqInput(tags=sorted(tags))
            await self.manager.resume_memory_occupation(request)
            self._asleep -= tags
            if not self._asleep:
                await self._resume()


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, ServiceError) else error_line(error)


def _check(reply: tuple[bool, str]) -> None:
    """Raise if SGLang replied that it failed: it raises nothing itself."""
    success, message = reply
    if not success:
        raise ServiceError(f"SGLang refused: {message}")
