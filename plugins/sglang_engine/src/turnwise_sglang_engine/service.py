"""
What SGLang's process does for each frame: requests, aborts, new weights, sleep.

It calls SGLang's tokenizer manager, always on one event loop. What SGLang does not do is done here: an abort that comes
before the request has reached the scheduler, an end-of-turn id of the model that the request did not ask for, and
requests that wait outside while weights change.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from attrs import define, field

from turnwise_sglang_engine.frames import Frame
from turnwise_sglang_engine.loading import check_shared_memory, map_file, tensors_of
from turnwise_sglang_engine.requests import FILTERED, GREEDY, PLAIN

_DISPATCH_POLL_S = 0.001


class ServiceError(Exception):
    """Why something cannot be done, in one line for a person."""


@define(eq=False)
class Turn:
    """
    One request: what was asked, and what has come back of it.

    Attributes:
        head: of its frame.
        context: (n,) ids.
        rid: SGLang's name for it; aborts match by prefix there, so no name begins like another.
        aborted: end it with what it has.
        state: what SGLang's tokenizer manager holds of it, once it is being aborted.
        task: that serves it.
    """

    head: dict[str, Any]
    context: list[int]
    rid: str = ""
    aborted: bool = False
    state: Any = None
    task: asyncio.Task[None] | None = None
    ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    spans: list[tuple[int, int, int]] = field(factory=list)
    num_cached: int = 0
    reason: str = ""
    stop: int | str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """SGLang's sampling parameters for what is left to sample."""
        options: dict[str, Any] = self.head["options"]
        return options | {"max_new_tokens": options["max_new_tokens"] - len(self.ids)}

    def add(self, output: dict[str, Any]) -> None:
        """Take what SGLang answered; `reason` stays empty when the request must go on."""
        meta = output["meta_info"]
        ids = list(output["output_ids"])
        start = len(self.ids)
        logprobs = self._logprobs_in(meta)
        if self.head["draw"] != GREEDY:
            # An abort in a queue may tell fewer of one than of the other.
            ids = ids[: len(logprobs)]
            self.logprobs += logprobs[: len(ids)]
        if not self.ids:
            self.num_cached = meta.get("cached_tokens", 0)
        self.ids += ids
        self.spans += [
            (int(span["version"]), start + span["start"], start + min(span["end"], len(ids)))
            for span in meta.get("weight_versions") or ()
        ]
        self._end(meta["finish_reason"])

    def _logprobs_in(self, meta: dict[str, Any]) -> list[float]:
        if self.head["draw"] == PLAIN:
            return [value for value, *_ in meta.get("output_token_logprobs") or ()]
        if self.head["draw"] == FILTERED:
            name = "output_token_sampling_logprobs"
            return list(meta.get(name) or getattr(self.state, name, None) or [])
        return []

    def _end(self, finish: dict[str, Any]) -> None:
        matched = finish.get("matched")
        if finish["type"] == "abort" and not self.aborted:
            raise ServiceError(f"SGLang ended it: {finish.get('message') or 'no reason given'}")
        if finish["type"] == "stop" and isinstance(matched, int) and matched not in self.options["stop_token_ids"]:
            # The model's own end of turn, which the request did not name: go on behind it.
            self.reason = "" if self.options["max_new_tokens"] else "length"
            return
        self.reason, self.stop = finish["type"], matched


@define(eq=False)
class Service:
    """
    Answers frames.

    Attributes:
        manager: SGLang's tokenizer manager.
        structs: the module of its request classes.
        serialize: makes bytes of named tensors, for one rank.
        num_ranks: how many ranks want such bytes.
        group: owns the tasks.
        send: sends a frame's head and arrays.
    """

    manager: Any
    structs: Any
    serialize: Callable[[Any], bytes]
    num_ranks: int
    group: asyncio.TaskGroup
    send: Callable[..., None] = field(init=False)
    _turns: dict[int, Turn] = field(factory=dict, init=False)
    _open: bool = field(default=True, init=False)
    _gate: asyncio.Condition = field(factory=asyncio.Condition, init=False)
    _switching: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _asleep: set[str] = field(factory=set, init=False)

    def receive(self, frame: Frame) -> None:
        """Take a frame; what it asks for is done by a task."""
        head = frame.head
        if head["op"] == "generate":
            turn = self._turns[head["id"]] = Turn(head, frame.arrays[0].tolist())
            turn.task = self.group.create_task(self._answer(turn))
        elif head["op"] == "cancel":
            running = self._turns.get(head["id"])
            if running is not None and running.task is not None:
                running.task.cancel()
        elif head["op"] == "abort":
            if running := self._turns.get(head["id"]):
                self.group.create_task(self._abort(running))
        else:
            self.group.create_task(self._control(head))

    async def _answer(self, turn: Turn) -> None:
        try:
            await self._sample(turn)
        except Exception as error:  # noqa: BLE001 - whatever SGLang raises belongs to this request alone
            text = str(error) if isinstance(error, ServiceError) else f"{type(error).__name__}: {error}"
            self.send({"id": turn.head["id"], "error": text})
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
        if turn.head["draw"] != GREEDY:
            arrays.append(np.array(turn.logprobs, np.float32))
        self.send(head, *arrays)

    async def _sample(self, turn: Turn) -> None:
        while not turn.reason:
            async with self._gate:
                await self._gate.wait_for(lambda: self._open or turn.aborted)
            if turn.aborted:
                turn.reason = "abort"
                return
            # Nothing waits between here and SGLang's own note of the request, so an abort finds one or the other.
            turn.rid = uuid.uuid4().hex
            request = self.structs.GenerateReqInput(
                input_ids=turn.context + turn.ids,
                sampling_params=turn.options,
                rid=turn.rid,
                return_logprob=turn.head["draw"] == PLAIN,
                return_sampling_mask=turn.head["draw"] == FILTERED,
            )
            answers = [each async for each in self.manager.generate_request(request, None)]
            turn.add(answers[-1])

    async def _abort(self, turn: Turn) -> None:
        turn.aborted = True
        async with self._gate:
            self._gate.notify_all()
        # Before it has been sent to the scheduler, an abort would overtake it and be forgotten.
        while (state := self.manager.rid_to_state.get(turn.rid)) is not None:
            turn.state = state
            if state.dispatched:
                self.manager.abort_request(turn.rid)
                return
            await asyncio.sleep(_DISPATCH_POLL_S)

    async def _control(self, head: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": head["id"]}
        try:
            async with self._switching:
                if head["op"] == "update":
                    await self._update(head, reply)
                elif head["op"] == "sleep":
                    await self._sleep(set(head["tags"]))
                else:
                    await self._wake_up(set(head["tags"]))
        except Exception as error:  # noqa: BLE001 - whatever SGLang raises is told to who asked
            text = str(error) if isinstance(error, ServiceError) else f"{type(error).__name__}: {error}"
            reply["error"] = text
        self.send(reply)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Keep new requests outside, and put those that run back into the queue, without keys and values."""
        await self._pause()
        try:
            yield
        finally:
            if not self._asleep:
                await self._continue()

    async def _pause(self) -> None:
        self._open = False
        await self.manager.pause_generation(self.structs.PauseGenerationReqInput(mode="retract"))

    async def _continue(self) -> None:
        await self.manager.continue_generation(self.structs.ContinueGenerationReqInput(torch_empty_cache=False))
        self._open = True
        async with self._gate:
            self._gate.notify_all()

    async def _update(self, head: dict[str, Any], reply: dict[str, Any]) -> None:
        """Load weights in the pause; `reply` says `torn` as soon as something may have changed."""
        buckets = head["buckets"]
        memory = map_file(head["path"], head["size"]) if buckets else None
        check_shared_memory(buckets)
        async with self._paused():
            if memory is not None:
                await self._load_all(memory, head, reply)
            else:
                await self._load_nothing(head["version"])

    async def _load_all(self, memory: Any, head: dict[str, Any], reply: dict[str, Any]) -> None:
        _check(await self.manager.begin_weight_update(self.structs.BeginWeightUpdateReqInput()))
        reply["torn"] = True
        try:
            for number, bucket in enumerate(head["buckets"], start=1):
                version = head["version"] if number == len(head["buckets"]) else None
                await self._load(tensors_of(memory, bucket), version)
        finally:
            # Also behind a failure, or the next update would find the session open.
            ended = await self.manager.end_weight_update(self.structs.EndWeightUpdateReqInput())
        _check(ended)
        reply["torn"] = False

    async def _load(self, tensors: list[tuple[str, Any]], version: int | None) -> None:
        """Load one bucket; the last one brings the version and empties the cache."""
        request = self.structs.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[self.serialize(tensors) for _ in range(self.num_ranks)],
            flush_cache=version is not None,
            weight_version=None if version is None else str(version),
        )
        _check(await self.manager.update_weights_from_tensor(request))

    async def _load_nothing(self, version: int) -> None:
        request = self.structs.UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        await self.manager.update_weight_version(request)
        flushed = await self.manager.flush_cache()
        _check((flushed.success, flushed.message))

    async def _sleep(self, tags: set[str]) -> None:
        """Free memory. SGLang's scheduler dies of it unless it is idle or paused, so it stays paused."""
        if tags := tags - self._asleep:
            if not self._asleep:
                await self._pause()
            request = self.structs.ReleaseMemoryOccupationReqInput(tags=sorted(tags))
            await self.manager.release_memory_occupation(request)
            self._asleep |= tags

    async def _wake_up(self, tags: set[str]) -> None:
        """Take memory again. SGLang's scheduler dies of a tag that is awake."""
        if tags := tags & self._asleep:
            request = self.structs.ResumeMemoryOccupationReqInput(tags=sorted(tags))
            await self.manager.resume_memory_occupation(request)
            self._asleep -= tags
            if not self._asleep:
                await self._continue()


def _check(answer: tuple[bool, str]) -> None:
    """Raise for an answer of SGLang that says no: it does not."""
    success, message = answer
    if not success:
        raise ServiceError(f"SGLang refused: {message}")
