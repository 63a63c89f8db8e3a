"""The fake tokenizer manager and scheduler. Sampled ids depend on the sum of the context and on the weights."""

import asyncio
import base64
import json
import os
import pickle
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np

STEP_S = 0.002


class Manager:
    """Samples one token per step for each request."""

    def __init__(self, arguments):
        self.arguments = arguments
        config = json.loads((Path(arguments["model_path"]) / "config.json").read_text())
        self.vocab_size, self.eos = config["vocab_size"], config.get("eos_token_id")
        self.rid_to_state = {}
        self.bias = 0
        self.version = arguments["weight_version"]
        self.paused = self.session = False
        self.released = set()
        self.seen = set()
        self.running = asyncio.Event()
        self.running.set()

    async def generate_request(self, request, _http=None):
        state = self.rid_to_state[request.rid] = SimpleNamespace(dispatched=False, aborted=False)
        try:
            await asyncio.sleep(STEP_S)  # the request is on its way to the scheduler
            state.dispatched = True
            async for output in self._run(request, state):
                if output["meta_info"]["finish_reason"] or request.stream:
                    yield output
        finally:
            del self.rid_to_state[request.rid]

    def _routes(self, request, ids):
        """Return the experts of all tokens but the last: of two layers, one for each token."""
        if not request.return_routed_experts:
            return {}
        assert self.arguments["enable_return_routed_experts"]
        known = np.array(ids[:-1], np.int32)
        routes = np.stack([known % 4, (known + 1) % 4], -1)
        return {"routed_experts": base64.b64encode(routes.tobytes()).decode()}

    async def _run(self, request, state):
        context, options = list(request.input_ids), request.sampling_params
        limit = self.arguments["context_length"]
        if len(context) >= limit - 6:
            raise ValueError(f"the input of {len(context)} tokens is too long")
        # Truncated silently.
        wanted = min(options["max_new_tokens"], limit - 2 - len(context))
        ids, versions, logprobs = [], [], []

        def output(finish):
            meta = {"finish_reason": finish, "cached_tokens": cached, "weight_versions": spans(versions)}
            if request.return_logprob:
                meta["output_token_logprobs"] = [(value, each, None) for value, each in zip(logprobs, ids, strict=True)]
            if request.return_sampling_mask:
                if not 1 <= options["top_k"] <= self.arguments["sampling_mask_max_tokens"]:
                    raise ValueError("return_sampling_mask requires a finite top_k")
                meta["output_token_sampling_logprobs"] = [value / 2 for value in logprobs]
            meta |= self._routes(request, [*context, *ids])
            return {"output_ids": list(ids), "meta_info": meta}

        cached = self._cached(context)
        finish = {"type": "length", "length": wanted}
        while len(ids) < wanted:
            await asyncio.sleep(STEP_S)
            await self._step(state)
            if state.aborted:
                finish = {"type": "abort", "message": "Aborted by AbortReq."}
                break
            ids.append(self._next(context + ids, options))
            versions.append(self.version)
            logprobs.append(-0.5)
            if not options["ignore_eos"] and (ids[-1] in options["stop_token_ids"] or ids[-1] == self.eos):
                finish = {"type": "stop", "matched": ids[-1]}
                break
            if len(ids) < wanted:
                yield output(None)
        self.seen.add(tuple(context))
        yield output(finish)

    async def _step(self, state):
        while not self.running.is_set() and not state.aborted:  # noqa: ASYNC110 - SGLang's scheduler polls too
            await asyncio.sleep(STEP_S)

    def _next(self, context, options):
        if options["temperature"] == 0:
            return (sum(context) * 7 + len(context) + self.bias) % self.vocab_size
        if "sampling_seed" in options:
            return random.Random(options["sampling_seed"] * 1000 + len(context)).randrange(self.vocab_size)
        return random.randrange(self.vocab_size)

    def _cached(self, context):
        if self.arguments["disable_radix_cache"]:
            return 0
        return len(context) - 1 if tuple(context) in self.seen else 0

    def abort_request(self, rid):
        for other, state in self.rid_to_state.items():
            if other.startswith(rid) and state.dispatched:
                state.aborted = True

    async def pause_generation(self, request):
        assert request.mode == "retract"
        self.paused = True
        self.running.clear()

    async def continue_generation(self, request):
        assert not request.torch_empty_cache
        self.paused = False
        self.running.set()

    async def begin_weight_update(self, _request, _http=None):
        if self.session:
            return False, "a session is open"
        self.session = True
        return True, ""

    async def end_weight_update(self, _request, _http=None):
        self.session = False
        return True, ""

    async def update_weights_from_tensor(self, request, _http=None):
        assert len(request.serialized_named_tensors) == self.arguments["tp_size"]
        if not self.session:
            return False, "must run between begin_weight_update() and end_weight_update()"
        for payload in request.serialized_named_tensors[1:]:
            assert [name for name, _ in pickle.loads(payload)]
        for name, array in pickle.loads(request.serialized_named_tensors[0]):
            if (array == -13).all():
                return False, f"cannot load {name}"
            if (array == -14).all():
                os.kill(os.getpid(), signal.SIGKILL)
            self.bias = int(array.sum())
        if request.flush_cache:
            self.seen.clear()
        if request.weight_version is not None:
            self.version = request.weight_version
        return True, ""

    async def update_weight_version(self, request):
        self.version = request.new_version

    async def flush_cache(self):
        if self.rid_to_state and not self.paused:
            return SimpleNamespace(success=False, message="requests are running")
        self.seen.clear()
        return SimpleNamespace(success=True, message="")

    async def release_memory_occupation(self, request, _http=None):
        self._must(self.paused or not self.rid_to_state)
        self.released |= set(request.tags)

    async def resume_memory_occupation(self, request, _http=None):
        self._must(set(request.tags) <= self.released)
        self.released -= set(request.tags)

    def _must(self, condition):
        if not condition:
            print("AssertionError: the scheduler is not idle", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def spans(versions):
    """Return the runs of equal versions."""
    found = []
    for index, version in enumerate(versions):
        if found and found[-1]["version"] == version:
            found[-1]["end"] = index + 1
        else:
            found.append({"version": version, "start": index, "end": index + 1})
    return found
