"""
Runs an engine in a Ray actor from a separate interpreter, so that the tests' own process never starts Ray.

    python -m turnwise_testing.engines.actor_run < PICKLE > JSON
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from typing import Any, Final

from attrs import frozen

from turnwise.plugin.registry import Registry
from turnwise.protocols import Resources
from turnwise.types import GenerateRequest

_NUM_STARTS: Final = 3


@frozen(kw_only=True)
class ActorJob:
    """A job for the actor: the place of a factory, its arguments, and the request."""

    entry_point: str
    module: str
    hook: str
    registered: str
    config: Any
    resources: Resources
    request: GenerateRequest


class EngineActor:
    """Builds an engine from a job."""

    async def ask(self, job: ActorJob) -> tuple[int, int]:
        """Return how many tokens the engine was given, and how many it sampled."""
        registry: Registry[Any] = Registry(job.hook.removeprefix("register_").removesuffix("s"))
        with registry.owned_by(job.entry_point):
            getattr(importlib.import_module(job.module), job.hook)(registry=registry)
        engine = registry.get(job.registered).factory(job.config, job.resources)
        await engine.start()
        try:
            result = await engine.generate(job.request)
        finally:
            await engine.stop()
        return len(job.request.token_ids), len(result.token_ids)


def start_ray() -> None:
    """Start a cluster of one node; Ray gives its node 30 s, which a busy machine may exceed twice in a row."""
    import ray

    for attempt in range(_NUM_STARTS):
        try:
            ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        except Exception:
            ray.shutdown()
            if attempt + 1 == _NUM_STARTS:
                raise
        else:
            return


def main() -> None:
    """Read a job from standard input and write the actor's result."""
    import ray

    from turnwise_testing.engines.actor_run import EngineActor as Importable

    job = pickle.loads(sys.stdin.buffer.read())
    start_ray()
    try:
        actor: Any = ray.remote(Importable).options(num_cpus=0).remote()
        answer = ray.get(actor.ask.remote(job))
    finally:
        ray.shutdown()
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
