"""
turnwise runs inside verl: each process has one rollout manager for each set of sampling parameters.

verl's config sets the model, the prompt and response lengths and the sampling. The run's config sets everything else:
agent, parser, tools and reward. verl's config names this file as `turnwise.config` (`+turnwise.config=...` on the
command line).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

from attrs import frozen

from turnwise import RolloutManager, Task, load_config
from turnwise.errors import ConfigError
from turnwise_verl_bridge.engine import use_client
from turnwise_verl_bridge.pictures import VisionRows, read_message


@frozen(kw_only=True)
class Sampling:
    """Sampling parameters from verl's config, for training or for validation."""

    temperature: float
    top_p: float
    top_k: int

    @classmethod
    def from_verl(cls, params: Mapping[str, Any]) -> Sampling:
        """Read verl's parameters; greedy sampling ignores top-p and top-k."""
        temperature = float(params["temperature"])
        if temperature == 0:
            return cls(temperature=0.0, top_p=1.0, top_k=-1)
        return cls(temperature=temperature, top_p=float(params["top_p"]), top_k=int(params["top_k"]))


_RUNNING: Final[dict[tuple[int, str, Sampling], RolloutManager]] = {}
_VISION: Final[WeakKeyDictionary[RolloutManager, VisionRows | None]] = WeakKeyDictionary()
_STARTING: Final = threading.Lock()


def get_manager(verl_config: object, client: object, sampling: Sampling) -> RolloutManager:
    """
    Return this process's running manager for some sampling parameters; start it on first use.

    Raises:
        ConfigError: verl's config has no `turnwise.config`, or `calculate_log_probs` is off.
    """
    path = _config_path(verl_config)
    with _STARTING:
        key = (id(client), path, sampling)
        if key not in _RUNNING:
            with use_client(client) as engines:
                manager = RolloutManager.from_config(load_run_config(verl_config, sampling))
            _VISION[manager] = engines[0].vision if engines else None
            manager.start()
            _RUNNING[key] = manager
        return _RUNNING[key]


def vision_of(manager: RolloutManager) -> VisionRows | None:
    """Return what computes the fields of pictures for a manager of this module; None for a model without pictures."""
    return _VISION.get(manager)


def stop_all() -> None:
    """Stop all managers of this process."""
    with _STARTING:
        while _RUNNING:
            _RUNNING.popitem()[1].stop()


def _config_path(verl_config: Any) -> str:
    section = verl_config.get("turnwise")
    path = section.get("config") if section else None
    if not path:
        raise ConfigError("turnwise.config is not set in verl's config: add +turnwise.config=run.yaml")
    return str(path)


def load_run_config(verl_config: Any, sampling: Sampling) -> Any:
    """Load the run's config with verl's lengths, model and sampling."""
    rollout = verl_config.actor_rollout_ref.rollout
    if not rollout.get("calculate_log_probs"):
        raise ConfigError("actor_rollout_ref.rollout.calculate_log_probs is false: turnwise needs it to be true")
    overrides = [
        "engine=verl",
        f"engine.max_context={rollout.prompt_length + rollout.response_length}",
        "runtime={name: local}",  # drops the options of the file's runtime
        "rollout.n=1",
        "rollout.validation_n=1",
        f"rollout.prompt_length={rollout.prompt_length}",
        f"rollout.response_length={rollout.response_length}",
        "rollout.fixed_widths=false",  # the bridge pads for verl's V0, and verl pads the other rows
        f"rollout.sampling.temperature={sampling.temperature}",
        f"rollout.sampling.top_p={sampling.top_p}",
        f"rollout.sampling.top_k={sampling.top_k}",
    ]
    if rollout.get("enable_rollout_routing_replay"):
        overrides.append("engine.enable_return_routed_experts=true")
    config = load_config(_config_path(verl_config), overrides)
    if config.model.path is None:
        config = load_config(
            _config_path(verl_config), [*overrides, f"model.path={verl_config.actor_rollout_ref.model.path}"]
        )
    return config


_AGENTS: Final = {"single_turn_agent": "single_turn", "turnwise": ""}
"""verl's names of agents that turnwise calls otherwise."""


def build_task(fields: Mapping[str, Any], uid: str) -> Task:
    """
    Build a task from a row of verl's data set.

    `raw_prompt` has the messages. `reward_model.ground_truth`, `data_source`, `extra_info` and `agent_name` have verl's
    meaning: the last one names the agent that runs the row. verl's `single_turn_agent` is turnwise's `single_turn`, and
    `turnwise`, the bridge's loop in verl, is the run's default agent. With that loop `agent_name` is always `turnwise`,
    and `turnwise_agent` takes its place.
    """
    named = str(fields.get("turnwise_agent") or fields.get("agent_name") or "")
    agent_name = _AGENTS.get(named, named)
    ground_truth = dict(fields.get("reward_model") or {}).get("ground_truth")
    return Task(
        messages=tuple(read_message(message) for message in fields["raw_prompt"]),
        uid=uid,
        agent_name=agent_name,
        ground_truth=ground_truth,
        data_source=str(fields.get("data_source") or ""),
        extra=dict(fields.get("extra_info") or {}),
    )
