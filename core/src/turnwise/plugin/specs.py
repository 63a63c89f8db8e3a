"""
Every hook of turnwise, and nothing else.

A plugin is a module, named by an entry point of the group ``turnwise``, with functions marked ``@turnwise.hookimpl``.

The hooks ``wrap_*`` change parts of a run. Each gets a built part and returns another part of the same protocol, which
the run uses in its place, or None to leave it. `turnwise.Wrapper` is the base class of such parts.

A plugin that is installed wraps nothing by itself. Its hooks are called for a run if the config has a section with the
name of the plugin's entry point, or if the config's `plugins` lists this name.

They are called once per process, when it builds the part, and never per episode or turn. Without a wrapper, the part
is the object that its factory returned. Each wrapper gets the result of the one before it. In pluggy's order the first
is outside: a plugin with ``@hookimpl(tryfirst=True)`` is outside of others, one with ``trylast=True`` inside, and of
the rest the last by name is outside. pluggy gives all implementations of one call the same arguments, so the core
calls each plugin's apart, with pluggy's `subset_hook_caller`.

A hook that raises, or that returns something without the methods of the protocol, ends the run before its first episode
with a `WrapperError` that names the plugin and the hook.

These rules hold for the hooks ``register_*``. A docstring adds the meaning of its registry, and what to avoid.

When: once per process, from `turnwise.plugin.host.load`: in the driver, and again in every worker and replica. None is
    awaited, and none runs per episode, turn or token.
Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)`` and
    returns an object of the type in the registry's annotation.
Errors: `DuplicateNameError` when another plugin has the name.

Example::

    @turnwise.hookimpl
    def register_engines(registry):
        registry.add("my_engine", make_engine, config=EngineConfig)
"""

from __future__ import annotations

import pluggy

from turnwise.events.observer import Observer
from turnwise.plugin.kinds import HookSpecs, Section
from turnwise.plugin.registry import Registry
from turnwise.protocols import (
    Adapter,
    Agent,
    Chat,
    Command,
    Diagnostic,
    Engine,
    GroupReward,
    Interaction,
    Postprocessor,
    ReasoningParser,
    Reward,
    Router,
    RunInfo,
    Tool,
    ToolParser,
    WeightTransport,
)
from turnwise.record.column_specs import ColumnSpec

hookspec = pluggy.HookspecMarker("turnwise")
hookimpl = pluggy.HookimplMarker("turnwise")


@hookspec
def add_hookspecs(specs: HookSpecs) -> None:
    """
    Add hooks of a plugin's own, by which other plugins register parts of a new kind.

    It gets no registry and runs before all other hooks, so the order in which plugins are loaded does not matter. Other
    plugins mark their functions with `turnwise.hookimpl`, as for the core's hooks.

    Do not: register parts; the added hooks do, also for the plugin's own ones.
    """


@hookspec
def register_engines(registry: Registry[Engine]) -> None:
    """
    Add inference engines.

    Do not: import the engine, touch a device or read files; `Engine.start` does that.
    """


@hookspec
def register_chats(registry: Registry[Chat]) -> None:
    """
    Add chats, which turn messages into token ids: the template of a model, or the renderer of a family of models.

    The factory gets the model as `resources.model`, of the run or of its judge.

    Do not: load a tokenizer at registration; the factory does.
    """


@hookspec
def register_tool_parsers(registry: Registry[ToolParser]) -> None:
    """
    Add parsers that find tool calls in sampled tokens.

    Do not: decode at registration; `resources.chat` is there when the parser is built.
    """


@hookspec
def register_reasoning_parsers(registry: Registry[ReasoningParser]) -> None:
    """
    Add parsers that split the reasoning from the text of a turn.

    Do not: look for tool calls; the tool parser reads tokens.
    """


@hookspec
def register_agents(registry: Registry[Agent]) -> None:
    """
    Add agents: state machines that turn a task into an episode.

    Do not: keep anything about an episode on the agent; one object serves many at once.
    """


@hookspec
def register_tools(registry: Registry[Tool | tuple[Tool, ...]]) -> None:
    """
    Add tools that the model can call; a factory may return several, such as the tools of a server.

    Do not: open connections; `Tool.create` does that for each episode.
    """


@hookspec
def register_interactions(registry: Registry[Interaction]) -> None:
    """
    Add user simulators that answer the model between its turns.

    Do not: keep anything about an episode on the object; `create` returns its session.
    """


@hookspec
def register_rewards(registry: Registry[Reward]) -> None:
    """
    Add rewards that score finished episodes inside the rollout.

    Do not: load models; a reward that needs one loads it on first use.
    """


@hookspec
def register_group_rewards(registry: Registry[GroupReward]) -> None:
    """
    Add rewards that score the episodes of a task together.

    Do not: keep anything about a group on the object; one object scores many at once.
    """


@hookspec
def register_postprocessors(registry: Registry[Postprocessor]) -> None:
    """
    Add postprocessors that put fields into a batch.

    Do not: change fields that are there; a name that is taken is an error.
    """


@hookspec
def register_routers(registry: Registry[Router]) -> None:
    """
    Add routers that choose a replica for a trajectory.

    Do not: query replicas; a router decides from `ReplicaLoad` alone.
    """


@hookspec
def register_weight_transports(registry: Registry[WeightTransport]) -> None:
    """
    Add ways to carry weights from the trainer to the replicas.

    Do not: open groups or shared memory; `publish` and `apply` do.
    """


@hookspec
def register_observers(registry: Registry[Observer]) -> None:
    """
    Add observers of runs, turns, tools and episodes.

    With ``enabled_if=function``, a run also has the observer without naming it in its config if the function returns
    True.

    Do not: block, or change the observed objects.
    """


@hookspec
def register_columns(registry: Registry[ColumnSpec]) -> None:
    """
    Declare open columns: values of tokens beside the core's, such as the experts that an engine chose.

    The factory returns the declaration, whose name is the registered one. It may read `resources.model` for a shape.
    Every run with the plugin knows the column; a record has it once an engine or a scorer gives values.

    Do not: take a name of the core's columns, or of another plugin's; the run is refused.
    """


@hookspec
def register_commands(registry: Registry[Command]) -> None:
    """
    Add subcommands of the command line.

    Do not: parse or print anything; `Command.run` does.
    """


@hookspec
def register_adapters(registry: Registry[Adapter]) -> None:
    """
    Add makers of parts from Python objects, such as functions; each is asked in the order of the names.

    Each is built with its default options.

    Do not: adapt objects that have the methods of their kind's protocol; they are used as they are.
    """


@hookspec
def register_diagnostics(registry: Registry[Diagnostic]) -> None:
    """
    Add checks of this machine, for commands that report whether turnwise works on it.

    Each is built with its default options.

    Do not: check anything; `Diagnostic.diagnose` does.
    """


@hookspec(firstresult=True)
def config_section() -> Section | None:
    """
    Return the plugin's own section of a config, which has the name of its entry point.

    A plugin that wraps parts and lacks this hook has a section without options.

    Do not: read a config; the hooks that wrap parts get the section as `RunInfo.section`.
    """


@hookspec(firstresult=True)
def wrap_engine(engine: Engine, run: RunInfo) -> Engine | None:
    """
    Wrap the engine that samples for the run; the judge's engine is not wrapped.

    Do not: change a result of `generate`: the tokens that it returns are trained.
    """


@hookspec(firstresult=True)
def wrap_tool_parser(tool_parser: ToolParser, run: RunInfo) -> ToolParser | None:
    """
    Wrap the tool parser.

    Do not: raise in `parse`; a malformed call is a `ToolCall` with an error.
    """


@hookspec(firstresult=True)
def wrap_agent(agent: Agent, run: RunInfo) -> Agent | None:
    """
    Wrap the agent; each agent of a run is wrapped when it is built.

    Do not: keep anything about an episode on the wrapper; one object serves many at once.
    """


@hookspec(firstresult=True)
def wrap_tool(tool: Tool, run: RunInfo) -> Tool | None:
    """
    Wrap the tool; each tool of a run is wrapped.

    Do not: open connections; `Tool.create` does that for each episode.
    """


@hookspec(firstresult=True)
def wrap_interaction(interaction: Interaction, run: RunInfo) -> Interaction | None:
    """
    Wrap the user simulator.

    Do not: keep anything about an episode on the wrapper; `create` returns its session.
    """


@hookspec(firstresult=True)
def wrap_reward(reward: Reward, run: RunInfo) -> Reward | None:
    """
    Wrap the reward.

    Do not: change the episode that it scores.
    """


@hookspec(firstresult=True)
def wrap_group_reward(group_reward: GroupReward, run: RunInfo) -> GroupReward | None:
    """
    Wrap the group reward.

    Do not: keep anything about a group on the wrapper; one object scores many at once.
    """


@hookspec(firstresult=True)
def wrap_postprocessor(postprocessor: Postprocessor, run: RunInfo) -> Postprocessor | None:
    """
    Wrap the postprocessor; each one of a run is wrapped.

    Do not: change fields that are there; a name that is taken is an error.
    """


def core_kinds() -> HookSpecs:
    """Return the kinds of parts of the core, which adds them as a plugin adds its own."""
    specs = HookSpecs()
    specs.add(register_adapters, part="adapter", contract=Adapter)
    specs.add(register_agents, part="agent", contract=Agent)
    specs.add(register_chats, part="chat", contract=Chat)
    specs.add(register_columns, part="column", contract=ColumnSpec)
    specs.add(register_commands, part="command", contract=Command)
    specs.add(register_diagnostics, part="diagnostic", contract=Diagnostic)
    specs.add(register_engines, part="engine", contract=Engine)
    specs.add(register_group_rewards, part="group reward", contract=GroupReward)
    specs.add(register_interactions, part="interaction", contract=Interaction)
    specs.add(register_observers, part="observer", contract=Observer)
    specs.add(register_postprocessors, part="postprocessor", contract=Postprocessor)
    specs.add(register_reasoning_parsers, part="reasoning parser", contract=ReasoningParser)
    specs.add(register_rewards, part="reward", contract=Reward)
    specs.add(register_routers, part="router", contract=Router)
    specs.add(register_tool_parsers, part="tool parser", contract=ToolParser)
    specs.add(register_tools, part="tool", contract=Tool)
    specs.add(register_weight_transports, part="weight transport", contract=WeightTransport)
    return specs
