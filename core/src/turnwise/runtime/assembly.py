"""
From a config to a manager: builds every part once, in the order in which parts need each other.

The same functions build the parts inside a worker or a replica of another process, from the same config and recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog
from attrs import evolve

from turnwise.chat import load_chat
from turnwise.config import RunConfig
from turnwise.config_file import read_mapping
from turnwise.config_parts import Choice, ToolEntry, ToolFunction
from turnwise.config_structure import structure
from turnwise.dataset import load_tasks
from turnwise.driver import Recipe
from turnwise.episode_setup import EngineClient, Limits
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.host import Host, Kind, load, resolve
from turnwise.observer import Observer, Place
from turnwise.protocols import Agent, Engine, Judge, Postprocessor, Resources, Reward
from turnwise.runtime.judge_client import JudgeClient, JudgeElsewhere
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager, Runtime
from turnwise.runtime.placement import RunPlacement, placement_of
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.replica_pool import ReplicaPool
from turnwise.runtime.weight_parts import group_weights_of, preparation_of
from turnwise.runtime.worker import WorkerParts
from turnwise.spans import SPANS, spans_wanted
from turnwise.telemetry import Observers
from turnwise.tools import ToolBox, ToolSpec, load_tools, tool_specs
from turnwise.types import PluginRecipe, Task


def host_of(config: RunConfig) -> Host:
    """Return a host with the plugins that the config allows."""
    return load(PluginRecipe(allow=config.plugins))


def manager_of(config: RunConfig, host: Host | None = None, *, observers: Iterable[Observer] = ()) -> RolloutManager:
    """
    Build a run.

    Args:
        config: what to run.
        host: with the plugins loaded; made from the config when None.
        observers: who listens besides the config's own.

    Raises:
        ConfigError, PluginError, TemplateError: one line that says what in the config cannot be.
    """
    host = host_of(config) if host is None else host
    config = resolve(config, host)  # checks what was not read from a file, too
    placement = placement_of(config)
    if config.runtime.name == "ray":
        resources = resources_of(config, host)
        recipes: Mapping[str, Recipe] = recipes_of(config, host, resources)
        heard = Observers.of([*observers, *observers_of(config, host, resources, place="driver")])
        runtime: Runtime = _ray_runtime(config, host, heard, placement)
    else:
        judge = judge_engine_of(config, host)
        resources = resources_of(config, host, judge)
        heard = Observers.of([*observers, *observers_of(config, host, resources)])
        engine = engine_of(config, host)
        parts = parts_of(config, host, resources, engine, heard)
        prepare = preparation_of(config)
        recipes, runtime = parts.recipes, LocalRuntime(engine, parts, config.runtime.num_workers, judge, prepare)
    return RolloutManager(runtime, plan_of(config, host, resources, recipes), heard, resources.chat)


def _ray_runtime(config: RunConfig, host: Host, observers: Observers, placement: RunPlacement) -> Runtime:
    try:
        from turnwise.runtime.ray_runtime import RayRuntime
    except ModuleNotFoundError as error:
        raise ConfigError(f"runtime ray needs {error.name}: pip install 'turnwise[ray]'") from error
    from turnwise.runtime.blueprint import ConfigBlueprint

    blueprint, weights = ConfigBlueprint.of(config, host), group_weights_of(config, host)
    return RayRuntime(blueprint, config.runtime, observers, placement, weights)


def engine_of(config: RunConfig, host: Host) -> Engine:
    """Build the engine, which is given the model and never sees text."""
    resources = Resources(model=config.model_spec(), seed=config.rollout.seed)
    engine: Engine = _build(host, "engines", config.engine, resources, "engine")
    return engine


def judge_engine_of(config: RunConfig, host: Host) -> Engine | None:
    """Build the judge's engine, when there is a judge."""
    judge = config.judge
    if judge is None:
        return None
    resources = Resources(model=config.model_spec(judge.model), seed=config.rollout.seed)
    engine: Engine = _build(host, "engines", judge.engine, resources, "judge.engine")
    return engine


def judge_of(config: RunConfig, client: EngineClient | None) -> Judge | None:
    """Build what rewards ask, when there is a judge; without a client it cannot be asked in this process."""
    judge = config.judge
    if judge is None:
        return None
    model = config.model_spec(judge.model)
    return JudgeClient(
        engine=client or JudgeElsewhere(),
        chat=load_chat(model) if model.path else None,
        sampling=judge.sampling,
        seed=config.rollout.seed,
        release=client.release if isinstance(client, ReplicaPool) else _keep_nothing,
    )


def _keep_nothing(_key: str) -> None:
    """Do nothing: a single engine keeps no context."""


def reward_of(config: RunConfig, host: Host, resources: Resources) -> Reward | None:
    """Build the reward, when there is one."""
    if config.reward is None:
        return None
    reward: Reward = _build(host, "rewards", config.reward, resources, "reward")
    return reward


def parts_of(
    config: RunConfig, host: Host, resources: Resources, engine: EngineClient, observers: Observers
) -> WorkerParts:
    """Build what a worker is made of."""
    return WorkerParts(
        engine=engine,
        recipes=recipes_of(config, host, resources),
        limits=limits_of(config),
        stop_token_ids=resources.chat.stop_token_ids if resources.chat else (),
        interaction=resources.interaction,
        observers=observers,
        max_in_flight=config.rollout.max_in_flight,
    )


def tasks_of(config: RunConfig) -> list[Task]:
    """Read the config's data set, or in validation its validation set; `DataError` says what is wrong with it."""
    data = config.data
    path = data.path
    if config.rollout.validation:
        if data.validation_path is None:
            raise ConfigError("rollout.validation is true, but data.validation_path is not set")
        path = data.validation_path
    return load_tasks(
        config.locate(path),
        format=None if data.format == "auto" else data.format,
        limit=data.limit,
        offset=data.offset,
        shuffle_seed=config.rollout.seed if data.shuffle else None,
    )


def resources_of(config: RunConfig, host: Host, judge: EngineClient | None = None) -> Resources:
    """Build what other parts are built from: chat template, judge, then the parser, the tools and the simulator."""
    model = config.model_spec()
    chat = load_chat(model) if model.path else None
    resources = Resources(model=model, seed=config.rollout.seed, chat=chat, judge=judge_of(config, judge))
    if config.parser is not None:
        resources = evolve(resources, parser=_build(host, "tool_parsers", config.parser, resources, "parser"))
    resources = evolve(resources, tools=tools_of(config, host, resources))
    if config.interaction is not None:
        simulator = _build(host, "interactions", config.interaction, resources, "interaction")
        resources = evolve(resources, interaction=simulator)
    return resources


def tools_of(config: RunConfig, host: Host, resources: Resources) -> dict[str, Any]:
    """Build the tools of `tools` and `tools_file`."""
    specs = [_tool_spec(entry) for entry in config.tools]
    if config.tools_file is not None:
        path: Path = config.locate(config.tools_file)
        specs += tool_specs(read_mapping(path).get("tools"), where=f"{path}: tools")
    return load_tools(specs, host.tools, resources, config.tool_modules, structure=structure)


def _tool_spec(entry: ToolEntry) -> ToolSpec:
    if isinstance(entry, Choice):
        return ToolSpec(name=entry.name, options=entry.options)
    if isinstance(entry, ToolFunction):
        return ToolSpec(function=entry.function, options={"run_in": entry.run_in} if entry.run_in else {})
    return ToolSpec(class_path=entry.target, options=entry.options)


def recipes_of(config: RunConfig, host: Host, resources: Resources) -> dict[str, Recipe]:
    """Build what drives episodes, by agent name: the config's agents, and others that need no options."""
    reward = reward_of(config, host, resources)
    tools = ToolBox(resources.tools)
    check = config.rollout.check_invariants
    return {
        name: Recipe(agent=agent, reward=reward, tools=tools, check_invariants=check)
        for name, agent in _agents_of(config, host, resources).items()
    }


def _agents_of(config: RunConfig, host: Host, resources: Resources) -> dict[str, Agent]:
    agents: dict[str, Agent] = {}
    for name in host.agents.names():
        if name not in (config.agent.name, *config.agents):
            try:
                agents[name] = host.build("agents", name, {}, resources, path=f"agents.{name}")
            except TurnwiseError as error:
                # A task may name it all the same; it is then an unknown agent of this run.
                structlog.get_logger().debug("agent left out", agent=name, reason=str(error))
    agents[config.agent.name] = _build(host, "agents", config.agent, resources, "agent")
    for name, choice in config.agents.items():
        agents[name] = _build(host, "agents", choice, resources, f"agents.{name}")
    return agents


def observers_of(config: RunConfig, host: Host, resources: Resources, place: Place | None = None) -> list[Observer]:
    """Build the config's observers, those that an OTLP endpoint asks for included: all, or those of one place."""
    choices = {f"observers.{index}": choice for index, choice in enumerate(config.observers)}
    if spans_wanted(choice.name for choice in config.observers):
        choices["observers"] = Choice(SPANS)
    built = [_build(host, "observers", choice, resources, path) for path, choice in choices.items()]
    return [observer for observer in built if place in (None, observer.place)]


def limits_of(config: RunConfig) -> Limits:
    """Return what one episode may use."""
    rollout, deadlines = config.rollout, config.rollout.deadlines
    return Limits(
        prompt_length=rollout.prompt_length,
        response_length=rollout.response_length,
        prompt_policy=config.data.prompt_policy,
        tool_call_s=deadlines.tool_call_s,
        turn_s=deadlines.turn_s,
        episode_s=deadlines.episode_s,
        reward_s=deadlines.reward_s,
        abort_grace_s=deadlines.abort_grace_s,
        loop_lag_s=deadlines.loop_lag_s,
        max_steps=rollout.max_steps,
    )


def plan_of(config: RunConfig, host: Host, resources: Resources, recipes: Mapping[str, Recipe]) -> RolloutPlan:
    """Return how tasks become episodes and episodes a batch."""
    rollout = config.rollout
    postprocessors: tuple[Postprocessor, ...] = tuple(
        _build(host, "postprocessors", choice, resources, f"postprocessors.{index}")
        for index, choice in enumerate(config.postprocessors)
    )
    return RolloutPlan(
        default_agent=config.agent.name,
        agent_names=frozenset(recipes),
        n=rollout.n,
        validation_n=rollout.validation_n,
        seed=rollout.seed,
        sampling=rollout.sampling,
        validation_sampling=rollout.validation_sampling,
        prompt_policy=config.data.prompt_policy,
        pad_token_id=_pad_token_id(resources),
        postprocessors=postprocessors,
    )


def _pad_token_id(resources: Resources) -> int:
    """Return the id that fills batches: no mask lets it be seen, so without one of its own a model takes 0."""
    tokenizer = resources.chat.tokenizer if resources.chat else None
    found = getattr(tokenizer, "pad_token_id", None)
    return 0 if found is None else int(found)


def _build(host: Host, kind: Kind, choice: Choice, resources: Resources, path: str) -> Any:
    return host.build(kind, choice.name, choice.options, resources, path=path)
