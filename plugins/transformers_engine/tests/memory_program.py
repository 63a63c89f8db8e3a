"""Prints the resident memory of an engine awake and asleep, and its outputs before and after: DIRECTORY DECODER."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from turnwise.protocols import Resources
from turnwise.weights.sources import source_of
from turnwise_engine_support.freed_memory import return_freed_memory
from turnwise_testing.engines.scenarios import generate_together, run_scenario, simple_request
from turnwise_transformers_engine import TransformersConfig, TransformersEngine

directory, decoder = Path(sys.argv[1]), sys.argv[2]


async def sample(engine):
    """Return the ids of two requests that fill most pages of the cache, because untouched memory is not resident."""
    prompts = [np.arange(4000) * (7 + i) % 48000 for i in range(2)]
    requests = [simple_request(str(i), prompts[i], max_tokens=2, temperature=0.0) for i in range(2)]
    return [each.token_ids.tolist() for each in await generate_together(engine, requests)]


async def scenario(engine):
    await engine.update_weights(source_of(directory), 1)  # unread pages of a mapped file are not resident
    before = await sample(engine)
    used = {}

    def measure(name):
        return_freed_memory()
        used[name] = engine.stats()["memory_bytes"]

    measure("awake")
    await engine.sleep(1)
    measure("level 1")
    await engine.sleep(2)
    measure("level 2")
    await engine.wake_up(["weights"])
    await engine.update_weights(source_of(directory), 2)
    measure("weights awake")
    await engine.wake_up(["kv_cache"])
    return used, before, await sample(engine)


torch.set_num_threads(1)
config = TransformersConfig(model=directory, device="cpu", max_context=4096, decoder=decoder)
print(json.dumps(run_scenario(TransformersEngine(config, Resources()), scenario, timeout_s=600)))
