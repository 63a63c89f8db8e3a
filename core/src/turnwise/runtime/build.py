"""
Builds the parts of a run from its config.

Every process of a run (driver, worker, replica) makes a `RunBuilder` from the same config and the same plugins, and
gets its parts from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
from attrs import define, evolve, field

from turnwise.chat.template import load_chat
from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part
from turnwise.config.run import RunConfig
from turnwise.data.dataset import read_tasks
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import EngineClient, Limits
from turnwise.errors import ConfigError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer, Place
from turnwise.options import Deadlines, GroupOptions
from turnwise.plugin.host import Host
from turnwise.protocols import Chat, Engine, Judge, ModelSpec, Resources, Reward, Router, Tool, WeightTransport
from turnwise.protocols.weights import WeightSource
from turnwise.runtime.judge import JudgeClient
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.tools import build_tools, read_tools_file
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise.types import Task
from turnwise.weights.sources import ConvertedSource, Weights, source_of


def load_tasks(config: RunConfig) -> list[Task]:
    """
    Read the tasks of a run: its data set, or the validation set where `rollout.validation` is true.

    Raises:
        ConfigError: `rollout.validation` is true, but the config names no validation set.
        DataError: the file cannot be read, or a row does not fit.
    """
    data = config.data
    path = data.path
    if config.rollout.validation:
        if data.validation_path is None:
            raise ConfigError("rollout.validation is true, but data.validation_path is not set")
        path = data.validation_path
    return read_tasks(
        config.locate(path),
        format=None if data.format == "auto" else data.format,
        limit=data.limit,
        offset=data.offset,
        shuffle_seed=config.rollout.seed if data.shuffle else None,
        columns=data.columns,
    )


@define(eq=False)
class RunBuilder:
    """
    Builds the parts of a run. Shared parts are built once, at the first use.

    Attributes:
        config: resolved, see `turnwise.config.resolve.resolve`.
        host: the loaded plugins.
        judge_client: replicas of the judge, in a process that sends them requests.
    """

    config: RunConfig
    host: Host
    judge_client: EngineClient | None = None

    @cached_property
    def model(self) -> ModelSpec:
        return self.config.model_spec()

    @cached_property
    def judge(self) -> Judge | None:
        """The judge for rewards; without a client it rejects requests."""
        judge, client = self.config.judge, self.judge_client
        if judge is None:
            return None
        model = self.config.model_spec(judge.model)
        return JudgeClient(
            engine=client,
            chat=self._load_chat(model),
            sampling=judge.sampling,
            seed=self.config.rollout.seed,
            release=client.release if isinstance(client, ReplicaPool) else None,
        )

    @cached_property
    def resources(self) -> Resources:
        """Resources of the plugins: model, chat, judge, parser, tools and simulated user."""
        config = self.config
        chat = self._load_chat(self.model)
        resources = Resources(model=self.model, seed=config.rollout.seed, chat=chat, judge=self.judge)
        # Each part is built with the parts before it: a parser may use the tools' schemas, and a simulated user both.
        resources = evolve(resources, tools=self._build_tools(resources))
        if config.parser is not None:
            parser = build_part(self.host, "tool_parsers", config.parser, resources, path="parser")
            resources = evolve(resources, parser=parser)
        if (choice := config.reasoning_parser) is not None:
            reasoning_parser = build_part(self.host, "reasoning_parsers", choice, resources, path="reasoning_parser")
            resources = evolve(resources, reasoning_parser=reasoning_parser)
        if config.interaction is not None:
            interaction = build_part(self.host, "interactions", config.interaction, resources, path="interaction")
            resources = evolve(resources, interaction=interaction)
        return resources

    @cached_property
    def reward(self) -> Reward | None:
        choice = self.config.reward
        if choice is None:
            return None
        reward: Reward = build_part(self.host, "rewards", choice, self.resources, path="reward")
        return reward

    @cached_property
    def programs(self) -> AgentPrograms:
        return AgentPrograms(self)

    def build_engine(self) -> Engine:
        """Build the engine. It gets the model and no chat template: an engine never sees text."""
        # Not `self.resources`: a replica would load the tokenizer and build tools that it never uses.
        resources = Resources(model=self.model, seed=self.config.rollout.seed)
        engine: Engine = build_part(self.host, "engines", self.config.engine, resources, path="engine")
        return engine

    def build_judge_engine(self) -> Engine | None:
        judge = self.config.judge
        if judge is None:
            return None
        resources = Resources(model=self.config.model_spec(judge.model), seed=self.config.rollout.seed)
        engine: Engine = build_part(self.host, "engines", judge.engine, resources, path="judge.engine")
        return engine

    def build_observers(self, place: Place | None = None) -> list[Observer]:
        """Build the observers that the config names or that enable themselves, of one place or of both."""
        choices = {f"observers.{index}": choice for index, choice in enumerate(self.config.observers)}
        named = {choice.name for choice in self.config.observers}
        for name, entry in self.host.observers.entries().items():
            # A named observer is on in any case, with the options of the config.
            if name not in named and entry.enabled_if is not None and entry.enabled_if():
                choices[f"observers ({name})"] = Choice(name)
        built = [
            build_part(self.host, "observers", choice, self.resources, path=path) for path, choice in choices.items()
        ]
        return [observer for observer in built if place in (None, observer.place)]

    def build_router(self) -> Router:
        choice = self.config.router or Choice("least_tokens")
        router: Router = build_part(self.host, "routers", choice, Resources(), path="router")
        return router

    def build_transport(self) -> WeightTransport | None:
        choice = transport_choice(self.config, self.host)
        if choice is None:
            return None
        transport: WeightTransport = build_part(
            self.host, "weight_transports", choice, Resources(model=self.model), path="weight_transport"
        )
        return transport

    def worker_components(self, engine: EngineClient, observers: Observers) -> WorkerComponents:
        """Return the components of a worker that samples from an engine or a pool of replicas."""
        chat = self.resources.chat
        return WorkerComponents(
            engine=engine,
            programs=self.programs,
            limits=self.limits(),
            stop_token_ids=chat.stop_token_ids if chat else (),
            interaction=self.resources.interaction,
            observers=observers,
            max_in_flight=self.config.rollout.max_in_flight,
        )

    def limits(self) -> Limits:
        rollout = self.config.rollout
        return Limits(
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            prompt_policy=self.config.data.prompt_policy,
            max_steps=rollout.max_steps,
            max_records=rollout.max_records,
            max_sampled_tokens=rollout.max_sampled_tokens,
            **_fields_of(Deadlines, rollout.deadlines),
        )

    def plan(self) -> RolloutPlan:
        """
        Return the plan, which turns tasks into episodes.

        It builds the agents that the config names, so that a broken one stops the run before an engine starts.
        """
        config = self.config
        for name in (config.agent.name, *config.agents):
            self.programs[name]
        postprocessors = tuple(
            build_part(self.host, "postprocessors", choice, self.resources, path=f"postprocessors.{index}")
            for index, choice in enumerate(config.postprocessors)
        )
        return RolloutPlan(
            default_agent=config.agent.name,
            agents=self.programs,
            prompt_policy=config.data.prompt_policy,
            pad_token_id=_pad_token_id(self.resources.chat),
            postprocessors=postprocessors,
            **_fields_of(GroupOptions, config.rollout),
        )

    def make_weight_source(self, weights: Weights) -> WeightSource:
        """Return a source of weights, cast, renamed and fused by the config's section `weights`."""
        options = self.config.weights
        source = source_of(weights)
        if options.dtype is None and not options.rename and not options.fuse:
            return source
        return ConvertedSource(source=source, dtype=options.dtype, rename=options.rename, fuse=options.fuse)

    def _load_chat(self, model: ModelSpec) -> Chat | None:
        return load_chat(model, self.config.rollout.special_tokens_in_content) if model.path else None

    def _build_tools(self, resources: Resources) -> dict[str, Tool]:
        config = self.config
        tools = build_tools(config.tools, self.host, resources, config.tool_modules, base_dir=config.base_dir)
        if config.tools_file is not None:
            path: Path = config.locate(config.tools_file)
            # Relative paths in a tools file start from the file, and not from the config that names it.
            more = build_tools(read_tools_file(path), self.host, resources, config.tool_modules, base_dir=path.parent)
            if both := tools.keys() & more.keys():
                raise ConfigError(f"{path}: tools and tools_file both have a tool {min(both)!r}")
            tools |= more
        return tools


@define(eq=False)
class AgentPrograms(Mapping[str, EpisodeProgram]):
    """
    Episode programs by agent name. An agent is built at its first lookup.

    So an installed agent that no task names costs nothing, even if its constructor is slow or broken.
    """

    _builder: RunBuilder
    _built: dict[str, EpisodeProgram] = field(factory=dict, init=False)

    def __getitem__(self, name: str) -> EpisodeProgram:
        """Return the program of an agent; `PluginError` or `ConfigError` when the agent cannot be built."""
        if name not in self:  # without this check an unknown name would be an error of the plugin registry
            raise KeyError(name)
        if name not in self._built:
            builder = self._builder
            path, choice = self._choices().get(name, (f"agents.{name}", Choice(name)))
            self._built[name] = EpisodeProgram(
                agent=build_part(builder.host, "agents", choice, builder.resources, path=path),
                reward=builder.reward,
                tools=ToolBox(builder.resources.tools),
                check_invariants=builder.config.rollout.check_invariants,
            )
        return self._built[name]

    def __contains__(self, name: object) -> bool:
        return name in self._choices() or name in self._builder.host.agents

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._choices(), *self._builder.host.agents.names()}))

    def __len__(self) -> int:
        return len({*self._choices(), *self._builder.host.agents.names()})

    def _choices(self) -> dict[str, tuple[str, Choice]]:
        """Return the agents that the config names, each with its place there."""
        config = self._builder.config
        named = {name: (f"agents.{name}", choice) for name, choice in config.agents.items()}
        # The section `agents` wins: it may give the default agent other options under its own name.
        return {config.agent.name: ("agent", config.agent), **named}


def transport_choice(config: RunConfig, host: Host) -> Choice | None:
    """Return the weight transport of a run: the configured one, or one that is registered under the runtime's name."""
    if config.weight_transport is not None:
        return config.weight_transport
    return Choice(config.runtime.name) if config.runtime.name in host.weight_transports else None


def _fields_of(shared: type, section: Any) -> dict[str, Any]:
    """Return the values of a config section for the fields of a class that it shares."""
    return {item.name: getattr(section, item.name) for item in attrs.fields(shared)}


def _pad_token_id(chat: Chat | None) -> int:
    """Return the padding id of the tokenizer, or 0: masks hide padding, so any id will do."""
    found = getattr(chat.tokenizer if chat else None, "pad_token_id", None)
    return 0 if found is None else int(found)
