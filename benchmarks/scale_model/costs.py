"""The measured costs of a run on Ray: CPU seconds of a message, a turn and an episode, by process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from attrs import field, fields, frozen

from turnwise.errors import ConfigError
from turnwise_routing_bench.traces import finite_seconds

INLINE_BYTES: Final = 100_000
"""Ray sends arguments and results up to this size inside the message, and larger ones through the object store."""


def _cost() -> float:
    cost: float = field(validator=finite_seconds)
    return cost


@frozen(kw_only=True)
class Costs:
    """
    CPU seconds; `benchmarks/scale_cost.py` measures them.

    Attributes:
        request_send_s: a worker's message to a replica through a channel, at the worker.
        request_receive_s: the same at the replica.
        result_send_s: a replica's message to a worker, at the replica.
        result_receive_s: the same at the worker.
        channel_send_byte_s: each byte of a message through a channel, at the sender.
        channel_receive_byte_s: the same at the receiver.
        dial_s: the opening of a channel, at the worker.
        accept_s: the same at the replica.
        send_byte_s: each byte of a message of the driver, or to it, of at most `INLINE_BYTES`, at the sender.
        receive_byte_s: the same at the receiver.
        send_store_byte_s: each byte of a larger one, which travels through the object store, at the sender.
        receive_store_byte_s: the same at the receiver.
        post_s: a message of the driver without a reply, at the driver.
        call_s: a call of the driver with a reply, at the driver.
        reply_s: the same at the called actor.
        worker_episode_s: start and end of an episode, at its worker.
        worker_turn_s: a turn, at the worker, without its messages.
        worker_token_s: each sampled token, at the worker.
        worker_prompt_token_s: each token of a prompt, at the worker.
        view_s: each replica in a router's view, for one choice.
        release_s: each replica in a worker's table, for the end of one episode.
        replica_request_s: a request, at the replica, without its messages and the engine.
        driver_episode_s: submission and collection of an episode, at the driver, without its messages.
        driver_token_s: each token of a collected episode, at the driver.
        gcs_actor_s: the start of an actor, at the head node's control process (GCS).
        gcs_death_s: the death of an actor, at the GCS.
        driver_wake_s: what a job of the driver takes longer if it was idle before: it wakes up, with cold caches.
        worker_wake_s: the same at a worker.
        replica_wake_s: the same at a replica.
        driver_idle: use of a core by the driver's other threads and its pings of a worker and a replica.
        worker_idle: use of a core by a worker's other threads.
        replica_idle: use of a core by a replica's other threads.
    """

    request_send_s: float = _cost()
    request_receive_s: float = _cost()
    result_send_s: float = _cost()
    result_receive_s: float = _cost()
    channel_send_byte_s: float = _cost()
    channel_receive_byte_s: float = _cost()
    dial_s: float = _cost()
    accept_s: float = _cost()
    send_byte_s: float = _cost()
    receive_byte_s: float = _cost()
    send_store_byte_s: float = _cost()
    receive_store_byte_s: float = _cost()
    post_s: float = _cost()
    call_s: float = _cost()
    reply_s: float = _cost()
    worker_episode_s: float = _cost()
    worker_turn_s: float = _cost()
    worker_token_s: float = _cost()
    worker_prompt_token_s: float = _cost()
    view_s: float = _cost()
    release_s: float = _cost()
    replica_request_s: float = _cost()
    driver_episode_s: float = _cost()
    driver_token_s: float = _cost()
    gcs_actor_s: float = _cost()
    gcs_death_s: float = _cost()
    driver_wake_s: float = _cost()
    worker_wake_s: float = _cost()
    replica_wake_s: float = _cost()
    driver_idle: float = _cost()
    worker_idle: float = _cost()
    replica_idle: float = _cost()

    def sent_bytes_s(self, num_bytes: float) -> float:
        """Return the seconds that the size of a message of the driver, or to it, costs its sender."""
        return num_bytes * (self.send_byte_s if num_bytes <= INLINE_BYTES else self.send_store_byte_s)

    def received_bytes_s(self, num_bytes: float) -> float:
        """Return the seconds that the size of a message costs its receiver."""
        return num_bytes * (self.receive_byte_s if num_bytes <= INLINE_BYTES else self.receive_store_byte_s)


@frozen(kw_only=True)
class Measurement:
    """
    Costs, and where they were measured.

    Attributes:
        machine: one line: processor, cores and package versions.
        costs: the medians.
    """

    machine: str
    costs: Costs


def load_costs(path: Path | None = None) -> Measurement:
    """
    Load a file of `benchmarks/scale_cost.py`, by default the one of this folder.

    Raises:
        ConfigError: the file does not exist, is no JSON, or lacks a cost.
    """
    source = path or Path(__file__).with_name("measured_costs.json")
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
        values: dict[str, Any] = {name: found["costs"][name]["median"] for name in fields_of_costs()}
        return Measurement(machine=found["machine"], costs=Costs(**values))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no {error} in it" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"--costs: cannot read {source}: {reason}; see benchmarks/scale_cost.py") from error


def fields_of_costs() -> tuple[str, ...]:
    """Return the names of the costs."""
    return tuple(attribute.name for attribute in fields(Costs))
