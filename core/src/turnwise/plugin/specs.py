"""
Every hook of turnwise, and nothing else.

A plugin is a module, named by an entry point of the group ``turnwise``, with functions marked ``@turnwise.hookimpl``.
These rules hold for every hook; its docstring adds the meaning of its registry, and the one thing to avoid.

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
from turnwise.plugin.added_kinds import HookSpecs
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
    Middleware,
    Postprocessor,
    ReasoningParser,
    Reward,
    Router,
    Tool,
    ToolParser,
    WeightTransport,
)

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
def register_middleware(registry: Registry[Middleware]) -> None:
    """
    Add middleware, which wraps the parts of runs that name it.

    With ``@hookimpl(tryfirst=True)`` it is outside of others, with ``trylast=True`` inside; else the order is the
    config's, the first outside.

    Do not: wrap anything here; `Middleware.wrap` does.
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
