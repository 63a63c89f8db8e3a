"""A config builds transports and memory switches, in the driver and again in a replica's process."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise import MemorySwitch, RolloutManager
from turnwise.config.file import load_config
from turnwise.config.resolve import resolve
from turnwise.errors import ConfigError
from turnwise.plugin.host import load
from turnwise.protocols import ReplicaLoad
from turnwise.runtime.build import RunBuilder, transport_choice
from turnwise.runtime.ray.blueprint import ConfigBlueprint, build_group_weights
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.wire import pack_results
from turnwise.types import Capabilities, GenerateRequest, SamplingParams
from turnwise.weights.memory_states import SwitchState
from turnwise_routers import LeastTokens, LeastTokensConfig

CONFIG = Path(__file__).parents[1] / "examples/calculator.yaml"


def config_with(*overrides: str) -> tuple[Any, Any]:
    """Return the example's config and a host."""
    host = load()
    return resolve(load_config(CONFIG, list(overrides)), host), host


def test_a_replica_builds_its_end_of_the_transport() -> None:
    """A pickled blueprint builds the transport with its options, and loads no other plugin."""
    config, host = config_with("runtime=ray", "weight_transport.name=shm", "weight_transport.bucket_bytes=4096")
    blueprint = pickle.loads(pickle.dumps(ConfigBlueprint.of(config, host)))

    transport = blueprint.make_transport()

    assert blueprint.transport_owner == "weight_transports"
    assert (type(transport).__name__, transport.config.bucket_bytes) == ("SharedMemoryTransport", 4096)


def test_a_replica_builds_the_transport_that_the_driver_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is connected to Ray when it builds its end; the driver was not when it chose."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    blueprint = ConfigBlueprint.of(*config_with("runtime=ray"))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)

    assert "SharedMemoryTransport" == type(blueprint.make_transport()).__name__


def test_the_default_transport_reaches_every_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shared memory if the run starts its own cluster, Ray's store on another one, and none in one process."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    here, host = config_with()
    own, _host = config_with("runtime=ray")
    another, _host = config_with("runtime=ray", "runtime.ray.address=10.0.0.1:6379")

    assert transport_choice(here, host) is None
    names = [choice and choice.name for choice in (transport_choice(own, host), transport_choice(another, host))]
    assert ["shm", "ray"] == names
    monkeypatch.setattr(ray, "is_initialized", lambda: True)  # to a cluster that may have other hosts
    assert (choice := transport_choice(own, host)) is not None
    assert "ray" == choice.name
    assert "install a plugin that registers one" in build_group_weights(RunBuilder(here, host)).missing


def test_an_unknown_transport_or_option_is_named() -> None:
    """The error suggests the name, before anything starts."""
    with pytest.raises(ConfigError, match="did you mean 'shm'"):
        config_with("weight_transport=shmm")
    with pytest.raises(ConfigError, match="bucket_size"):
        config_with("weight_transport.name=shm", "weight_transport.bucket_size=1")


def test_weights_are_prepared_as_the_config_says() -> None:
    """The config's dtype applies, and without options the weights are unchanged."""
    config, host = config_with("weights.dtype=bfloat16")
    plain, _host = config_with()
    weights = {"a": np.ones(2, np.float32)}

    assert [spec.dtype for spec in RunBuilder(config, host).make_weight_source(weights).specs] == ["bfloat16"]
    assert [spec.dtype for spec in RunBuilder(plain, host).make_weight_source(weights).specs] == ["float32"]


class Trainer:
    """A trainer without memory."""

    def offload_optimizer(self) -> None:
        """Do nothing."""

    def offload_parameters(self) -> None:
        """Do nothing."""

    def onload(self) -> None:
        """Do nothing."""


@pytest.mark.filterwarnings("ignore")
def test_the_embedded_engine_takes_turns_with_a_trainer() -> None:
    """In one process at level 2: a request to the sleeping engine fails, and new weights serve after the switch."""
    config, host = config_with("memory.mode=hybrid", "memory.level=2", "rollout.n=1", "data.limit=2")
    model = config.model_spec().path
    from turnwise_task_files import load_tasks

    with RolloutManager.from_config(config, host) as manager:
        switch = MemorySwitch(manager, Trainer(), level=config.memory.level)
        switch.to_training()
        (asleep, *_rest) = manager.rollout(load_tasks(config))
        report = switch.to_rollout(model)
        results = manager.rollout(load_tasks(config))

    assert "asleep" in (asleep.fault.message if asleep.fault else "")
    assert (SwitchState.ROLLOUT, 1) == (report.state, report.version)
    versions = {int(v) for result in results for t in result.trajectories for v in t.weight_versions if v >= 0}
    assert 1 in versions


def asleep_pool() -> tuple[ReplicaPool, list[list[Any]]]:
    """Return a pool of two replicas, and the messages that it sends to each."""
    pool = ReplicaPool(LeastTokens(LeastTokensConfig()), Capabilities(), 2)
    sent: list[list[Any]] = [[], []]
    for index in range(2):
        pool.replica_up(index, sent[index].append)
    return pool, sent


def asked_of(sent: list[list[Any]]) -> int | None:
    """Return the replica whose messages contain a request; other messages only release trajectories."""
    return next((index for index, messages in enumerate(sent) if any(each.request_ids for each in messages)), None)


def test_a_sleeping_replica_gets_no_requests() -> None:
    """A sleeping replica returns the request, which moves to another; when all sleep, the request fails."""
    request = GenerateRequest(request_id="a", trajectory_id="t", token_ids=[1], sampling=SamplingParams(max_tokens=1))

    async def scenario() -> None:
        pool, sent = asleep_pool()
        async with asyncio.TaskGroup() as group:
            group.create_task(pool.generate(request))
            for _ in range(2):
                while (index := asked_of(sent)) is None:  # noqa: ASYNC110 - the pool has no event for it
                    await asyncio.sleep(0)
                sent[index].clear()
                back = [("a", "AsleepError", "the replica is asleep")]
                pool.receive(index, pack_results([], failed=back, load=ReplicaLoad(available=False)))
                asked.append(index)

    asked: list[int] = []
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(scenario())
    assert "every replica is asleep" in str(raised.value.exceptions[0])
    assert sorted(asked) == [0, 1]
