"""From a config to what carries weights: the transport, and what is done to weights on the way."""

from __future__ import annotations

from typing import Any

from turnwise.config import RunConfig
from turnwise.config_parts import Choice
from turnwise.host import Host
from turnwise.memory import MemorySwitch, TrainerMemory
from turnwise.protocols import Resources, WeightTransport
from turnwise.runtime.group_weights import GroupWeights
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.weight_updates import Prepare, WeightUpdates
from turnwise.weight_sources import PreparedSource, source_of
from turnwise.weights import WeightSource


def transport_choice(config: RunConfig, host: Host) -> Choice | None:
    """Return the transport of a run: the configured one, or `ray` where replicas are elsewhere and it is installed."""
    if config.weight_transport is not None:
        return config.weight_transport
    if config.runtime.name == "ray" and "ray" in host.weight_transports:
        return Choice("ray")
    return None


def transport_of(config: RunConfig, host: Host) -> WeightTransport | None:
    """Build the transport, when there is one."""
    choice = transport_choice(config, host)
    if choice is None:
        return None
    transport: WeightTransport = host.build(
        "weight_transports", choice.name, choice.options, Resources(model=config.model_spec()), path="weight_transport"
    )
    return transport


def preparation_of(config: RunConfig) -> Prepare:
    """Return what makes a source of weights, cast, renamed and joined as the config says."""
    options = config.weights

    def prepare(weights: Any) -> WeightSource:
        source = source_of(weights)
        if options.dtype is None and not options.rename and not options.fuse:
            return source
        return PreparedSource(source=source, dtype=options.dtype, rename=options.rename, fuse=options.fuse)

    return prepare


def group_weights_of(config: RunConfig, host: Host) -> GroupWeights:
    """Build what keeps the replicas' weights alike."""
    choice, transport = transport_choice(config, host), transport_of(config, host)
    if choice is None or transport is None:
        missing = "there is no weight transport: pip install turnwise-weight-transports, and set weight_transport"
        return GroupWeights(missing=missing, keep_last=config.weights.keep_last)
    updates = WeightUpdates(transport, choice.name, preparation_of(config), config.weights.timeout_s)
    return GroupWeights(updates, keep_last=config.weights.keep_last)


def memory_switch_of(config: RunConfig, manager: RolloutManager, trainer: TrainerMemory) -> MemorySwitch:
    """
    Build the switch between a run's engines and a trainer, by the config's section `memory`.

    Args:
        config: of the run.
        manager: started.
        trainer: the trainer's side.
    """
    return MemorySwitch(
        manager, trainer, mode=config.memory.mode, level=config.memory.level, observers=manager.observers
    )
