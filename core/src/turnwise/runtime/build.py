"""
Builds the parts of a run from its config.

Every process of a run (driver, worker, replica) makes a `RunBuilder` from the same config and the same plugins, and
gets its parts from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
from attrs import define, evolve, field

from turnwise.config.models import reads_weights
from turnwise.config.own_code import OwnCode
from turnwise.config.parts import Choice, ModelConfig
from turnwise.config.resolve import build_part
from turnwise.config.run import RunConfig
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import EngineClient, Limits
from turnwise.errors import ConfigError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer, Place
from turnwise.options import Deadlines, GroupOptions
from turnwise.plugin.host import Host
from turnwise.protocols import (
    Agent,
    Chat,
    Engine,
    EngineCheckingAgent,
    FormattedParser,
    GradingReward,
    GroupReward,
    Judge,
    ModelSpec,
    Resources,
    Reward,
    Router,
    ServiceAgent,
    Tool,
    ToolParser,
    ToolWritingChat,
    WeightTransport,
)
from turnwise.protocols.weights import WeightSource
from turnwise.protocols.wrapper import Role
from turnwise.record.column_specs import ColumnSpec
from turnwise.runtime.columns import build_columns
from turnwise.runtime.groups import GroupScoring
from turnwise.runtime.judge import JudgeClient
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.reward_pool import RewardPool
from turnwise.runtime.service import DriverServices
from turnwise.runtime.tools import build_tools, read_tools_file
from turnwise.runtime.worker import WorkerComponents
from turnwise.runtime.wrapping import PartWrapper
from turnwise.tools.toolbox import ToolBox
from turnwise.weights.sources import ConvertedSource, Weights, source_of


@define(eq=False)
class RunBuilder:
    """
    Builds the parts of a run from a resolved config. Shared parts are built once, at the first use.

    `given` are objects that a program passes as parts, by their names in the config. An engine gets a folder with its
    weights, unless `fetches_weights` is false. This process has the `role`.
    """

    config: RunConfig
    host: Host
    judge_client: EngineClient | None = None
    given: Mapping[str, object] = field(factory=dict)
    fetches_weights: bool = True
    role: Role = "driver"

    @cached_property
    def code(self) -> OwnCode:
        """The user's own code that the run may use."""
        return OwnCode(modules=self.config.modules, base_dir=self.config.base_dir, given=self.given)

    def _build(self, kind: str, choice: Choice | None, path: str, resources: Resources | None = None) -> Any:
        """Build a part, with the run's resources unless others are given; None for one that is not configured."""
        if choice is None:
            return None
        resources = self.resources if resources is None else resources
        part = build_part(self.host, kind, choice, resources, path=path, code=self.code)
        return self.wrapper.wrap(kind, part, resources)

    @cached_property
    def model(self) -> ModelSpec:
        """The model; of one on the hub, this machine has the small files at least."""
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
            chat=self._build_chat(judge.chat, model, "judge.chat"),
            sampling=judge.sampling,
            seed=self.config.rollout.seed,
            release=client.release if isinstance(client, ReplicaPool) else None,
        )

    @cached_property
    def resources(self) -> Resources:
        """Resources of the plugins: model, chat, judge, parser, tools and simulated user."""
        config, rollout = self.config, self.config.rollout
        chat = self._build_chat(config.chat, self.model, "chat")
        resources = Resources(
            model=self.model,
            seed=rollout.seed,
            chat=chat,
            judge=self.judge,
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            find_code=self.code.find_any,
        )
        # Each part is built with the parts before it: a parser may use the tools' schemas, and a simulated user both.
        tools = self._build_tools(resources)
        tools = {name: self.wrapper.wrap("tools", tool, resources) for name, tool in tools.items()}
        resources = evolve(resources, tools=tools)
        resources = evolve(resources, parser=self._build("tool_parsers", config.parser, "parser", resources))
        resources = evolve(resources, chat=_with_tool_format(chat, resources.parser))
        reasoning = self._build("reasoning_parsers", config.reasoning_parser, "reasoning_parser", resources)
        resources = evolve(resources, reasoning_parser=reasoning)
        interaction = self._build("interactions", config.interaction, "interaction", resources)
        return evolve(resources, interaction=interaction)

    @cached_property
    def wrapper(self) -> PartWrapper:
        """Wraps the parts, by the hooks of the enabled plugins."""
        return PartWrapper(self.config, self.host, self.code, self._bare_resources, self.role)

    @property
    def _bare_resources(self) -> Resources:
        # For a replica, which would load the tokenizer and build tools that it never uses.
        return Resources(model=self.model, seed=self.config.rollout.seed)

    @cached_property
    def reward(self) -> Reward | None:
        reward: Reward | None = self._build("rewards", self.config.reward, "reward")
        return reward

    @cached_property
    def group_reward(self) -> GroupReward | None:
        reward: GroupReward | None = self._build("group_rewards", self.config.group_reward, "group_reward")
        return reward

    def build_groups(self, observers: Observers, pool: RewardPool | None = None) -> GroupScoring | None:
        """Build the group reward of the driver, which is asked in reward workers if there is a pool of them."""
        choice, rollout = self.config.group_reward, self.config.rollout
        if choice is None or self.group_reward is None:
            return None
        label = self._label("group_rewards", choice)
        return GroupScoring(self.group_reward, label, rollout, observers, rollout.deadlines.abort_grace_s, pool)

    @cached_property
    def programs(self) -> AgentPrograms:
        return AgentPrograms(self)

    def _label(self, kind: str, choice: Choice) -> str:
        return choice.name if choice.is_own_code else self.host.part_label(kind, choice.name)

    def build_agent(self, choice: Choice, path: str) -> Agent:
        agent: Agent = self._build("agents", choice, path)
        return agent

    def build_agents(self) -> None:
        """Build the agents that the config names, and the reward; their errors come now, and not with an episode."""
        for name in (self.config.agent.name, *self.config.agents):
            self.programs[name]
        _ = self.columns  # built for its errors
        if self.config.runtime.reward_workers and isinstance(self.reward, GradingReward):
            raise ConfigError(
                "runtime.reward_workers: the reward grades what the tools hold, which no reward worker has; set it to 0"
            )

    @cached_property
    def columns(self) -> dict[str, ColumnSpec]:
        """The open columns that plugins declare."""
        return build_columns(self.host, self.resources)

    def build_services(self) -> DriverServices:
        """Build the services of the agents that the config names; only the driver has them."""
        agents = {name: self.programs[name].agent for name in (self.config.agent.name, *self.config.agents)}
        found = {name: agent.make_service() for name, agent in agents.items() if isinstance(agent, ServiceAgent)}
        return DriverServices(found)

    def build_engine(self) -> Engine:
        """Build the engine. It gets the model and no chat template: an engine never sees text."""
        choice = self.config.engine
        resources = self._engine_resources(choice, self.config.model)
        engine: Engine = build_part(self.host, "engines", choice, resources, path="engine", code=self.code)
        return self.wrapper.wrap("engines", engine, resources)

    def build_judge_engine(self) -> Engine | None:
        judge = self.config.judge
        if judge is None:
            return None
        resources = self._engine_resources(judge.engine, judge.model)
        engine: Engine = build_part(self.host, "engines", judge.engine, resources, path="judge.engine", code=self.code)
        return engine

    def _engine_resources(self, engine: Choice, model: ModelConfig) -> Resources:
        # A replica on another machine than the driver's downloads the weights there, of the commit that the driver saw.
        weights = self.fetches_weights and reads_weights(self.host, engine)
        return Resources(model=self.config.model_spec(model, weights=weights), seed=self.config.rollout.seed)

    def build_observers(self, place: Place | None = None) -> list[Observer]:
        """Build the observers that the config names or that enable themselves, of one place or of both."""
        choices = {f"observers.{index}": choice for index, choice in enumerate(self.config.observers)}
        named = {choice.name for choice in self.config.observers}
        for name, entry in self.host.registry("observers").entries().items():
            # A named observer is on in any case, with the options of the config.
            if name not in named and entry.enabled_if is not None and entry.enabled_if():
                choices[f"observers ({name})"] = Choice(name)
        built = [self._build("observers", choice, path) for path, choice in choices.items()]
        return [observer for observer in built if place in (None, observer.place)]

    def build_router(self) -> Router:
        choice = self.config.router or Choice("least_tokens")
        router: Router = self._build("routers", choice, "router", Resources())
        return router

    def build_transport(self) -> WeightTransport | None:
        choice, resources = transport_choice(self.config, self.host), Resources(model=self.model)
        transport: WeightTransport | None = self._build("weight_transports", choice, "weight_transport", resources)
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
            default_agent=self.config.agent.name,
            columns=self.columns,
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
            max_pictures=rollout.max_pictures,
            **_fields_of(Deadlines, rollout.deadlines),
        )

    def plan(self) -> RolloutPlan:
        """
        Return the plan, which turns tasks into episodes.

        It builds the agents that the config names, so that a broken one stops the run before an engine starts.
        """
        config = self.config
        self.build_agents()
        choices = {f"postprocessors.{index}": choice for index, choice in enumerate(config.postprocessors)}
        postprocessors = {
            f"{path}: {self._label('postprocessors', choice)}": self._build("postprocessors", choice, path)
            for path, choice in choices.items()
        }
        agents = [self.programs[name].agent for name in (config.agent.name, *config.agents)]
        return RolloutPlan(
            default_agent=config.agent.name,
            agents=self.programs,
            prompt_policy=config.data.prompt_policy,
            max_prompt_tokens=config.rollout.prompt_length,
            pad_token_id=_pad_token_id(self.resources.chat),
            prompt_length=config.rollout.prompt_length if config.rollout.fixed_widths else None,
            response_length=config.rollout.response_length if config.rollout.fixed_widths else None,
            postprocessors=postprocessors,
            engine_checks=[agent for agent in agents if isinstance(agent, EngineCheckingAgent)],
            columns=self.columns,
            **_fields_of(GroupOptions, config.rollout),
        )

    def make_weight_source(self, weights: Weights) -> WeightSource:
        """Return a source of weights, cast, renamed and fused by the config's section `weights`."""
        options = self.config.weights
        source = source_of(weights)
        if options.dtype is None and not options.rename and not options.fuse:
            return source
        return ConvertedSource(source=source, dtype=options.dtype, rename=options.rename, fuse=options.fuse)

    def _build_chat(self, choice: Choice | None, model: ModelSpec, path: str) -> Chat | None:
        if model.path is None:
            return None
        resources = Resources(model=model, seed=self.config.rollout.seed)
        # Errors of the default one are about the model, so they get no place of a key that the config lacks.
        chosen, path = (Choice("jinja"), "") if choice is None else (choice, path)
        chat: Chat = build_part(self.host, "chats", chosen, resources, path=path, code=self.code)
        return chat

    def _build_tools(self, resources: Resources) -> dict[str, Tool]:
        config = self.config
        tools = build_tools(config.tools, self.host, resources, self.code)
        if config.tools_file is not None:
            path: Path = config.locate(config.tools_file)
            # Relative paths in a tools file start from the file, and not from the config that names it.
            code = evolve(self.code, base_dir=path.parent)
            more = build_tools(read_tools_file(path, config.modules), self.host, resources, code)
            if both := tools.keys() & more.keys():
                raise ConfigError(f"{path}: tools and tools_file both have a tool {min(both)!r}")
            tools |= more
        return tools


def _with_tool_format(chat: Chat | None, parser: ToolParser | None) -> Chat | None:
    """Return the chat with the format of the parser, if it writes tools itself."""
    if not isinstance(chat, ToolWritingChat):
        return chat
    return chat.with_tool_format(parser.tool_format if isinstance(parser, FormattedParser) else None)


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
                agent=builder.build_agent(choice, path),
                reward=builder.reward,
                tools=ToolBox(builder.resources.tools),
                check_invariants=builder.config.rollout.check_invariants,
                chat=builder.resources.chat,
            )
        return self._built[name]

    def __contains__(self, name: object) -> bool:
        return name in self._choices() or name in self._builder.host.registry("agents")

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._choices(), *self._builder.host.registry("agents").names()}))

    def __len__(self) -> int:
        return len({*self._choices(), *self._builder.host.registry("agents").names()})

    def _choices(self) -> dict[str, tuple[str, Choice]]:
        """Return the agents that the config names, each with its place there."""
        config = self._builder.config
        named = {name: (f"agents.{name}", choice) for name, choice in config.agents.items()}
        # The section `agents` wins: it may give the default agent other options under its own name.
        return {config.agent.name: ("agent", config.agent), **named}


def transport_choice(config: RunConfig, host: Host) -> Choice | None:
    """Return the weight transport of a run: the configured one, or the default one if it is registered."""
    if config.weight_transport is not None or config.runtime.name == "local":
        return config.weight_transport
    # A cluster that the run starts is one host, on which replicas read the trainer's copy in shared memory.
    is_connected = getattr(sys.modules.get("ray"), "is_initialized", bool)()
    name = "ray" if is_connected or config.runtime.ray.address not in (None, "local") else "shm"
    return Choice(name) if name in host.registry("weight_transports") else None


def _fields_of(shared: type, section: object) -> dict[str, Any]:
    """Return the values of a config section for the fields of a class that it shares."""
    return {item.name: getattr(section, item.name) for item in attrs.fields(shared)}


def _pad_token_id(chat: Chat | None) -> int:
    """Return the padding id of the tokenizer, or 0: masks hide padding, so any id will do."""
    found = getattr(chat.tokenizer if chat else None, "pad_token_id", None)
    return 0 if found is None else int(found)
