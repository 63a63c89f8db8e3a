"""A fake vLLM without a model, and engines around it."""

import asyncio
import gc
import importlib.util
import os
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from turnwise.protocols import ModelSpec, Resources
from turnwise.weights.sources import as_numpy
from turnwise_engine_support.stored_weights import map_weights
from turnwise_testing.engines.scenarios import VOCAB_SIZE, run_scenario, simple_request, skip_without_package
from turnwise_vllm_engine import VllmConfig, VllmEngine
from turnwise_vllm_engine.copies import Copies, local_places, machine_id
from turnwise_vllm_engine.launch import RunningVllm


def pytest_collection_modifyitems(items):
    """Skip tests of the real vLLM where it is not installed."""
    reason = "vLLM is not installed: run this in the environment of requirements-cpu.txt"
    skip_without_package(items, "vllm", "vllm", reason)


@pytest.fixture(scope="session", autouse=True)
def _collect_vllm_sockets():
    """Collect the contexts of closed sockets, which vLLM leaves behind, without their warnings."""
    yield
    if importlib.util.find_spec("vllm") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()


class FakeDeadError(Exception):
    """In place of vLLM's `EngineDeadError`."""


class FakeRefusalError(Exception):
    """In place of vLLM's `VLLMClientError`."""


def fake_picture_prompt(token_ids, places, arrays):
    """Return what vLLM is given, in place of its own type."""
    named = [(each.start, each.num_tokens, each.picture.key) for each in places]
    return {"prompt_token_ids": token_ids, "places": named, "grids": [each.grid for each in arrays]}


class FakeLlm:
    """
    The part of `AsyncLLM` that the engine uses, with pseudo-random ids instead of a model.

    The ids depend on the context and on the weight `w`. `calls` records the calls of the engine.
    """

    def __init__(self):
        self.requests, self.calls, self.weight, self.version = {}, [], 0.0, "default"
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.dead = False
        self.asleep = set()
        self.fail_next_load = None
        self.prompts = []
        self.machines, self.copies = [machine_id()], {}

    async def get_supported_tasks(self):
        return ("generate",)

    async def generate(self, prompt, params, request_id):
        if self.dead:
            raise FakeDeadError("the engine is gone")
        self.prompts.append(prompt)
        if params.top_k == 13:
            raise FakeRefusalError("thirteen\nis unlucky")
        request = self.requests[request_id] = SimpleNamespace(ids=[], spans=[], ended="")
        try:
            while not request.ended:
                await asyncio.sleep(0.001)
                await self.resumed.wait()
                if self.dead:
                    raise FakeDeadError("the engine is gone")
                if not request.ended:
                    self._sample(request, prompt["prompt_token_ids"], params)
                if params.streams and not request.ended:
                    yield self._output(request, params)
            yield self._output(request, params)
        finally:
            del self.requests[request_id]

    def _sample(self, request, context, params):
        seed = params.seed if params.temperature else None
        drawn = random.Random(str((context, request.ids, self.weight, seed))).randrange(VOCAB_SIZE)
        if not request.spans or request.spans[-1].version != self.version:
            request.spans.append(SimpleNamespace(version=self.version, start=len(request.ids), end=0))
        request.ids.append(drawn)
        request.spans[-1].end = len(request.ids)
        if drawn in params.stop_token_ids:
            request.ended, request.stop_reason = "stop", drawn
        elif len(request.ids) == params.max_tokens:
            request.ended, request.stop_reason = "length", None

    def _output(self, request, params):
        logprobs = SimpleNamespace(logprobs=[-0.5] * len(request.ids))
        completion = SimpleNamespace(
            token_ids=request.ids,
            logprobs=logprobs,
            finish_reason=request.ended,
            stop_reason=getattr(request, "stop_reason", None),
            weight_versions=request.spans,
        )
        return SimpleNamespace(outputs=[completion], num_cached_tokens=None)

    async def abort(self, request_ids):
        for request_id in request_ids:
            if request_id in self.requests:
                self.requests[request_id].ended = "abort"
        # vLLM returns the tokens that it has, even while it is paused.
        self.resumed.set()
        await asyncio.sleep(0)
        if self.calls and self.calls[-1] == "pause":
            self.resumed.clear()

    async def pause_generation(self, *, mode, clear_cache):
        assert clear_cache
        self.calls.append("pause" if mode == "keep" else f"pause {mode}")
        self.resumed.clear()

    async def resume_generation(self):
        self.calls.append("resume")
        self.resumed.set()

    async def collective_rpc(self, method, args=()):
        if method == "turnwise_memory":
            return [(os.getpid(), 100 if "kv_cache" in self.asleep else 300), (os.getpid(), 20)]
        if method in ("turnwise_free", "turnwise_restore"):
            self.calls.append(f"{method} {args[0]}")
            self.asleep = {"weights", "kv_cache"} if method == "turnwise_free" else self.asleep - {args[0]}
            return [None, None]
        self.calls.append(method)
        if method == "turnwise_describe":
            described = {"fused": [["q_proj", "k_proj", "v_proj"]], "tied": False}
            return [{**described, "machine": machine} for machine in self.machines]
        if self.dead:
            raise FakeDeadError("the engine is gone")
        error, self.fail_next_load = self.fail_next_load, None
        if error is not None:
            raise error
        if method == "turnwise_copy":
            return [self._copy(rank, *args) for rank in range(len(self.machines))]
        if method == "turnwise_drop_copies":
            for each in self.copies.values():
                each.close()
            return [None for _ in self.machines]
        # All workers return the same, so the last one's value is enough.
        places, paths = args
        return [self._load(local_places(places, paths.get(self.machines[-1], {})))]

    def _copy(self, rank, holders, path, offset, data):
        return self.copies.setdefault(rank, Copies()).write(path, offset, data) if rank in holders else ""

    def _load(self, places):
        self.loaded = {name: as_numpy(tensor, copy=True) for name, tensor in map_weights(places)}
        self.weight = float(sum(array.astype(np.float64).sum() for array in self.loaded.values()))
        return len(self.loaded)

    async def update_weight_version(self, version):
        self.version = version

    async def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags):
        self.calls.append(f"wake {tags}")
        self.asleep = self.asleep.difference(tags) if tags else set()

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.fixture
def llm():
    """A fake vLLM without a model."""
    return FakeLlm()


@pytest.fixture
def make_fake_engine(llm, tmp_path):
    """A function that makes an engine around `llm`, not started, on a GPU unless told otherwise."""

    def make(*, device="cuda", model=None, **options):
        def launcher(_config, _spec, _max_context, _stop_strings):
            return RunningVllm(
                llm, SimpleNamespace, VOCAB_SIZE, (FakeDeadError,), (FakeRefusalError,), fake_picture_prompt
            )

        spec = ModelSpec(path=model)
        config = VllmConfig(**{"max_context": 256, "weight_dir": tmp_path, **options})
        return VllmEngine(config, Resources(model=spec), launcher, device)

    return make


@pytest.fixture
def serve(make_fake_engine):
    """A function that runs `scenario(engine)` on a started engine around `llm`."""

    def run(scenario, **options):
        return run_scenario(make_fake_engine(**options), scenario)

    return run


@pytest.fixture(scope="session")
def ask():
    """A function that returns a request of 16 tokens on 37 ids, unless told otherwise."""
    return simple_request


def make_vision_reference(kind, directory):
    """Write a tiny vision-language model, whose heads have the smallest size of vLLM's kernels for a CPU."""
    from turnwise_testing.references.vision_reference import VisionReference
    from turnwise_tiny_models import VisionSizes, save_random_vision

    return VisionReference(save_random_vision(kind, directory, VisionSizes(hidden_size=128)))


@pytest.fixture(scope="session")
def qwen2_5_vl(tmp_path_factory):
    """The forward pass of a tiny Qwen2.5-VL."""
    return make_vision_reference("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="session")
def internvl(tmp_path_factory):
    """The forward pass of a tiny InternVL, whose heads have the smallest size of vLLM's kernels for a CPU."""
    from turnwise_testing.references.vision_reference import VisionReference
    from turnwise_tiny_models import save_random_tiles

    wide = {"hidden_size": 128, "head_dim": 32}
    return VisionReference(save_random_tiles("internvl", tmp_path_factory.mktemp("internvl"), options=wide))


@pytest.fixture(scope="session")
def qwen3_vl(tmp_path_factory):
    """The forward pass of a tiny Qwen3-VL."""
    return make_vision_reference("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))
