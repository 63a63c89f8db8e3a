"""From a config to what carries weights and switches memory, in the driver and again from what crosses a border."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.config_file import load_config
from turnwise.errors import ConfigError
from turnwise.host import load, resolve
from turnwise.memory_states import SwitchState
from turnwise.protocols import ReplicaLoad
from turnwise.routing import LeastTokens, LeastTokensConfig
from turnwise.runtime.assembly import manager_of
from turnwise.runtime.blueprint import ConfigBlueprint
from turnwise.runtime.replica_pool import ReplicaPool
from turnwise.runtime.weight_parts import group_weights_of, memory_switch_of, preparation_of, transport_choice
from turnwise.runtime.wire import pack_results
from turnwise.types import Capabilities, GenerateRequest, SamplingParams

CONFIG = Path(__file__).parents[1] / "examples/calculator.yaml"


def config_with(*overrides: str) -> tuple[Any, Any]:
    """Return the example's config and a host."""
    host = load()
    return resolve(load_config(CONFIG, list(overrides)), host), host


def test_a_replica_builds_its_end_of_the_transport() -> None:
    """From a pickled blueprint, with its options, loading the plugin of the transport and no other."""
    config, host = config_with("runtime=ray", "weight_transport.name=shm", "weight_transport.bucket_bytes=4096")
    blueprint = pickle.loads(pickle.dumps(ConfigBlueprint.of(config, host)))

    transport = blueprint.make_transport()

    assert blueprint.transport_owner == "weight_transports"
    assert (type(transport).__name__, transport.config.bucket_bytes) == ("SharedMemoryTransport", 4096)


def test_replicas_elsewhere_take_ray_unless_told_otherwise() -> None:
    """In this process nothing carries weights."""
    here, host = config_with()
    there, _host = config_with("runtime=ray")

    assert transport_choice(here, host) is None
    choice = transport_choice(there, host)
    assert choice is not None
    assert choice.name == "ray"
    assert "pip install turnwise-weight-transports" in group_weights_of(here, host).missing


def test_an_unknown_transport_or_option_is_named() -> None:
    """With a did-you-mean, before anything starts."""
    with pytest.raises(ConfigError, match="did you mean 'shm'"):
        config_with("weight_transport=shmm")
    with pytest.raises(ConfigError, match="bucket_size"):
        config_with("weight_transport.name=shm", "weight_transport.bucket_size=1")


def test_weights_are_prepared_as_the_config_says() -> None:
    """Cast and renamed; without options they stay as they are."""
    config, _host = config_with("weights.dtype=bfloat16")
    plain, _host = config_with()
    weights = {"a": np.ones(2, np.float32)}

    assert [spec.dtype for spec in preparation_of(config)(weights).specs] == ["bfloat16"]
    assert [spec.dtype for spec in preparation_of(plain)(weights).specs] == ["float32"]


class Trainer:
    """A trainer without memory."""

    def offload_optimizer(self) -> None:
        """Do nothing."""

    def offload_parameters(self) -> None:
        """Do nothing."""

    def onload(self) -> None:
        """Do nothing."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_embedded_engine_takes_turns_with_a_trainer() -> None:
    """A whole cycle at level 2 in this process: memory falls, new weights serve, and a request while asleep says so."""
    config, host = config_with("memory.mode=hybrid", "memory.level=2", "rollout.n=1", "data.limit=2")
    model = config.model_spec().path
    from turnwise.runtime.assembly import tasks_of

    with manager_of(config, host) as manager:
        switch = memory_switch_of(config, manager, Trainer())
        switch.to_training()
        (asleep, *_rest) = manager.rollout(tasks_of(config))
        report = switch.to_rollout(model)
        results = manager.rollout(tasks_of(config))

    assert "asleep" in (asleep.fault.message if asleep.fault else "")
    assert (SwitchState.ROLLOUT, 1) == (report.state, report.version)
    versions = {int(v) for result in results for t in result.trajectories for v in t.weight_versions if v >= 0}
    assert 1 in versions


def asleep_pool() -> tuple[ReplicaPool, list[list[Any]]]:
    """Return a pool of two replicas whose messages are kept, and the messages."""
    pool = ReplicaPool(LeastTokens(LeastTokensConfig()), Capabilities(), 2)
    sent: list[list[Any]] = [[], []]
    for index in range(2):
        pool.replica_up(index, sent[index].append)
    return pool, sent


def asked_of(sent: list[list[Any]]) -> int | None:
    """Return which replica has a request among its messages; others only tell it what to forget."""
    return next((index for index, messages in enumerate(sent) if any(each.request_ids for each in messages)), None)


def test_a_sleeping_replica_gets_no_requests() -> None:
    """One that is asked all the same sends the request back, and it goes elsewhere; when all sleep, that is said."""
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
