"""
Every hook of turnwise, and nothing else.

A plugin is a module, named by an entry point of the group ``turnwise``, with functions marked ``@turnwise.hookimpl``.
Each hook receives one typed registry; `turnwise.plugin.registry.Registry.add` puts names into it. Hooks are called once
per process, when a `turnwise.plugin.host.Host` is made: in the driver, and again in every worker and replica. None is
awaited, and none runs per episode, turn or token.
"""

from __future__ import annotations

import pluggy

from turnwise.events.observer import Observer
from turnwise.plugin.registry import Registry
from turnwise.protocols import (
    Agent,
    Command,
    Diagnostic,
    Engine,
    Interaction,
    Postprocessor,
    Reward,
    Router,
    Tool,
    ToolParser,
    WeightTransport,
)

hookspec = pluggy.HookspecMarker("turnwise")
hookimpl = pluggy.HookimplMarker("turnwise")


@hookspec
def register_engines(registry: Registry[Engine]) -> None:
    """
    Add inference engines.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns an `Engine`.
    Do not: import the engine, touch a device or read files; `Engine.start` does that.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_engines(registry):
            registry.add("my_engine", make_engine, config=EngineConfig)
    """


@hookspec
def register_tool_parsers(registry: Registry[ToolParser]) -> None:
    """
    Add parsers that find tool calls in sampled tokens.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns a `ToolParser`.
    Do not: decode at registration; `resources.chat` is there when the parser is built.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_tool_parsers(registry):
            registry.add("my_parser", make_parser, config=ParserConfig)
    """


@hookspec
def register_agents(registry: Registry[Agent]) -> None:
    """
    Add agents: state machines that turn a task into an episode.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns an `Agent`.
    Do not: keep anything about an episode on the agent; one object serves many at once.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_agents(registry):
            registry.add("debate", make_debate, config=DebateConfig)
    """


@hookspec
def register_tools(registry: Registry[Tool]) -> None:
    """
    Add tools that the model can call.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns a `Tool`.
    Do not: open connections; `Tool.create` does that for each episode.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_tools(registry):
            registry.add("search", make_search, config=SearchConfig)
    """


@hookspec
def register_interactions(registry: Registry[Interaction]) -> None:
    """
    Add user simulators that answer the model between its turns.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns an `Interaction`.
    Do not: keep anything about an episode on the object; `create` returns its session.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_interactions(registry):
            registry.add("patient_user", make_patient_user, config=PatientUserConfig)
    """


@hookspec
def register_rewards(registry: Registry[Reward]) -> None:
    """
    Add rewards that score finished episodes inside the rollout.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns a `Reward`.
    Do not: load models; a reward that needs one loads it on first use.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_rewards(registry):
            registry.add("brevity", make_brevity, config=BrevityConfig)
    """


@hookspec
def register_postprocessors(registry: Registry[Postprocessor]) -> None:
    """
    Add postprocessors that put fields into a batch.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns a `Postprocessor`.
    Do not: change fields that are there; a name that is taken is an error.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_postprocessors(registry):
            registry.add("group_stats", make_group_stats, config=GroupStatsConfig)
    """


@hookspec
def register_routers(registry: Registry[Router]) -> None:
    """
    Add routers that choose a replica for a trajectory.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns a `Router`.
    Do not: query replicas; a router decides from `ReplicaLoad` alone.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_routers(registry):
            registry.add("warmest", make_warmest, config=WarmestConfig)
    """


@hookspec
def register_weight_transports(registry: Registry[WeightTransport]) -> None:
    """
    Add ways to carry weights from the trainer to the replicas.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns a `WeightTransport`.
    Do not: open groups or shared memory; `publish` and `apply` do.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_weight_transports(registry):
            registry.add("my_transport", make_transport, config=TransportConfig)
    """


@hookspec
def register_observers(registry: Registry[Observer]) -> None:
    """
    Add observers of runs, turns, tools and episodes.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns an `Observer`. With ``enabled_if=function``, a run also has the observer without naming it in its
        config if the function returns True.
    Do not: block, or change the observed objects.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_observers(registry):
            registry.add("jsonl_log", make_jsonl_log, config=JsonlLogConfig)
    """


@hookspec
def register_commands(registry: Registry[Command]) -> None:
    """
    Add subcommands of the command line.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns a `Command`.
    Do not: parse or print anything; `Command.run` does.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_commands(registry):
            registry.add("report", make_report, config=NoConfig)
    """


@hookspec
def register_diagnostics(registry: Registry[Diagnostic]) -> None:
    """
    Add checks of this machine, for commands that report whether turnwise works on it.

    When: once per process, from `turnwise.plugin.host.load`; again in every worker and replica.
    Do: ``registry.add(name, factory, config=ConfigClass)``; the factory is called as ``factory(config, resources)``
        and returns a `Diagnostic`. Each is built with its default options.
    Do not: check anything; `Diagnostic.diagnose` does.
    Errors: `DuplicateNameError` when another plugin has the name.

    Example::

        @turnwise.hookimpl
        def register_diagnostics(registry):
            registry.add("my_engine", make_diagnostic, config=NoConfig)
    """
