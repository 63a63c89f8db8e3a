"""
turnwise runs inside verl: one manager for each way of sampling, in the process that asked for it.

verl's config says how long prompts and responses are and how tokens are drawn; the run's config says everything else:
agent, parser, tools, reward. Which file that is stands in verl's config as `turnwise.config` (`+turnwise.config=...` on
the command line).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from turnwise import RolloutManager, Task, load_config, manager_of
from turnwise.errors import ConfigError
from turnwise_verl_bridge.engine import bound_to


@frozen(kw_only=True)
class Sampling:
    """How tokens are drawn, as verl's config says it for training or for validation."""

    temperature: float
    top_p: float
    top_k: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Sampling:
        """Read verl's names; greedy has no top-k or top-p."""
        temperature = float(params["temperature"])
        if temperature == 0:
            return cls(temperature=0.0, top_p=1.0, top_k=-1)
        return cls(temperature=temperature, top_p=float(params["top_p"]), top_k=int(params["top_k"]))


_RUNNING: Final[dict[tuple[int, str, Sampling], RolloutManager]] = {}
_STARTING: Final = threading.Lock()


def manager_for(verl_config: Any, client: Any, sampling: Sampling) -> RolloutManager:
    """
    Return the running manager of this process for one way of sampling, and start it when there is none.

    Raises:
        ConfigError: verl's config names no run, or asks for none of the log-probabilities that training needs.
    """
    path = config_path(verl_config)
    with _STARTING:
        key = (id(client), path, sampling)
        if key not in _RUNNING:
            with bound_to(client):
                manager = manager_of(run_config(verl_config, sampling))
            manager.start()
            _RUNNING[key] = manager
        return _RUNNING[key]


def stop_all() -> None:
    """Stop the managers of this process."""
    with _STARTING:
        while _RUNNING:
            _RUNNING.popitem()[1].stop()


def config_path(verl_config: Any) -> str:
    """Return `turnwise.config` of verl's config."""
    section = verl_config.get("turnwise")
    path = section.get("config") if section else None
    if not path:
        raise ConfigError("verl's config names no turnwise run: add +turnwise.config=run.yaml")
    return str(path)


def run_config(verl_config: Any, sampling: Sampling) -> Any:
    """Return the run's config with verl's lengths, model and sampling."""
    rollout = verl_config.actor_rollout_ref.rollout
    if not rollout.get("calculate_log_probs"):
        raise ConfigError("turnwise needs what was sampled: set actor_rollout_ref.rollout.calculate_log_probs=true")
    overrides = [
        "engine=verl",
        f"engine.max_context={rollout.prompt_length + rollout.response_length}",
        "runtime={name: local}",  # and nothing of what the file says of another
        "rollout.n=1",
        "rollout.validation_n=1",
        f"rollout.prompt_length={rollout.prompt_length}",
        f"rollout.response_length={rollout.response_length}",
        f"rollout.sampling.temperature={sampling.temperature}",
        f"rollout.sampling.top_p={sampling.top_p}",
        f"rollout.sampling.top_k={sampling.top_k}",
    ]
    config = load_config(config_path(verl_config), overrides)
    if config.model.path is None:
        config = load_config(
            config_path(verl_config), [*overrides, f"model.path={verl_config.actor_rollout_ref.model.path}"]
        )
    return config


def task_of(fields: Mapping[str, Any], uid: str) -> Task:
    """
    Return a row of verl's data set as a task.

    `raw_prompt` are the messages; `reward_model.ground_truth`, `data_source`, `extra_info` and `agent_name` mean what
    they mean to verl. An agent of verl's own name for this bridge, `turnwise`, is the run's default agent.
    """
    agent_name = str(fields.get("turnwise_agent") or "")
    ground_truth = dict(fields.get("reward_model") or {}).get("ground_truth")
    return Task(
        messages=tuple(dict(message) for message in fields["raw_prompt"]),
        uid=uid,
        agent_name=agent_name,
        ground_truth=ground_truth,
        data_source=str(fields.get("data_source") or ""),
        extra=dict(fields.get("extra_info") or {}),
    )
