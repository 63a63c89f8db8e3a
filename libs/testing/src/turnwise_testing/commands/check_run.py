"""
Runs the conformance checks of a plugin without pytest, for ``turnwise check NAME``.

Options and resources of a check come from a run's config; without one the checks use defaults: engines
need a config with a model; parsers are taken to read Hermes' calls, and when they do not, the checks that write calls
are skipped and say so; rewards are asked about a few common answers to a task of the test kit, or to the first tasks of
the config; tools and commands are not called; environments are made with the options of the config's agent, and get
turns that mean nothing.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import attrs
from attrs import evolve, frozen

from turnwise.config.own_code import OwnCode
from turnwise.config.parts import KIND, Choice
from turnwise.config.resolve import build_part
from turnwise.config.run import RunConfig
from turnwise.config.sections import section_choices
from turnwise.config.structuring import structure
from turnwise.errors import ConfigError, PluginError, TurnwiseError
from turnwise.plugin.host import Host
from turnwise.plugin.registry import did_you_mean
from turnwise.protocols import Engine, Resources
from turnwise_testing.checks.check import CHECK_TIMEOUT_S, Check, promise_of, run_check, run_within
from turnwise_testing.checks.engine.run import ENGINE_CHECKS, EngineChecker
from turnwise_testing.checks.environment import ENVIRONMENT_CHECKS, GROUP, EnvironmentProbe
from turnwise_testing.checks.parser import PARSER_CHECKS, ParserProbe
from turnwise_testing.checks.part import KINDS, Part, checks_of, vocab_size_of
from turnwise_testing.checks.reward import refusal_of_tasks
from turnwise_testing.checks.wrapper import WRAPPER_CHECKS, WrapperProbe
from turnwise_testing.probes.agent import probe_chat, probe_resources
from turnwise_testing.probes.engine import EngineProbe

Verdict = Literal["passed", "failed", "skipped"]
_ENVIRONMENTS = "environments"
_WRAPPERS = "wrappers"
_NEED_CALLS = frozenset(
    {"a_good_call_is_found", "calls_keep_their_order", "end_of_turn_changes_nothing"}
    | {"random_conversations", "a_turn_may_be_cut_at_every_character", "calls_that_clients_send_back"}
)
ENGINE_TIMEOUT_S = 600.0
"""Least time limit of an engine's check: the first one may load a large model."""
_UNKNOWN_CALLS = "how it writes calls is not known; its own ToolParserSuite says it"
_MALFORMED = ('<tool_call>{"name": </tool_call>', "<tool_call>[]</tool_call>", '<tool_call>{"name": "add"')


@frozen(kw_only=True)
class Outcome:
    """
    The outcome of one check.

    Attributes:
        kind: registry that the checked name is in.
        name: of the checked part.
        check: name of the check.
        verdict: passed, failed or skipped.
        reason: of a failure or a skip; one line.
        promise: that the check is about; one sentence.
    """

    kind: str
    name: str
    check: str
    verdict: Verdict
    reason: str = ""
    promise: str = ""


def run_checks(
    host: Host,
    name: str,
    config: RunConfig | None,
    resources: Resources | None,
    timeout_s: float = CHECK_TIMEOUT_S,
) -> Iterator[Outcome]:
    """
    Check a registered name, or all that a plugin registers, and yield each outcome as it is known.

    Args:
        host: with the plugin loaded.
        name: a registered name, such as `hermes`, or a plugin's, such as `hermes_parser`.
        config: whose sections give the options; defaults when None.
        resources: for the factories of the parts; the test kit's own when None.
        timeout_s: longest time of one check in seconds; one that takes longer has failed.

    Raises:
        PluginError: nothing of that name can be checked.
    """
    for kind, registered in targets(host, name):
        target = _Target(host, kind, registered, config, resources, timeout_s)
        try:
            yield from _RUNNERS.get(kind, _check_added)(target)
        except TurnwiseError as error:  # the part cannot be built; the plugin's other parts are checked as well
            yield Outcome(kind=kind, name=registered, check="is_built", verdict="failed", reason=str(error))


def targets(host: Host, name: str) -> list[tuple[str, str]]:
    """Return the (kind, registered name) pairs of a name that have checks."""
    found = [(kind, name) for kind in host.kinds if name in host.registry(kind)]
    found += [(_ENVIRONMENTS, name) for _each in entry_points(group=GROUP, name=name)]
    for plugin in host.plugins:
        if plugin.name == name and plugin.state != "ok":
            raise PluginError(f"plugin {name!r} is broken: {plugin.error}")
        if plugin.name == name:
            found += [(kind, each) for kind in host.kinds for each in plugin.registers.get(kind, ())]
            # The parts of a section that lists parts are checked, and not the hooks that use them.
            found += [(_WRAPPERS, name)] if plugin.wraps and not host.sections[name].kind else []
    if not found:
        known = {each for kind in host.kinds for each in host.registry(kind).names()}
        known |= set(entry_points(group=GROUP).names)
        known |= {plugin.name for plugin in host.plugins if plugin.registers.keys() & set(host.kinds) or plugin.wraps}
        raise PluginError(f"nothing named {name!r} can be checked{did_you_mean(name, tuple(sorted(known)))}")
    return list(dict.fromkeys(found))


@frozen
class _Target:
    """One registered name, and how to build it."""

    host: Host
    kind: str
    name: str
    config: RunConfig | None
    resources: Resources | None
    timeout_s: float

    def options(self) -> Mapping[str, Any]:
        """Return the options that the config's sections give this name."""
        config = self.config
        if config is None:
            return {}
        for item in attrs.fields(RunConfig):
            section: Any = getattr(config, item.name) if KIND in item.metadata else None
            several = section.values() if isinstance(section, Mapping) else section
            for choice in several if isinstance(section, Mapping | tuple) else (section,):
                if isinstance(choice, Choice) and choice.name == self.name:
                    return choice.options
        for plugin, section in self.host.sections.items():
            for choice in section_choices(config.sections.get(plugin, []), plugin) if section.kind == self.kind else ():
                if choice.name == self.name:
                    return choice.options
        return next(_choices_in(config.train, self.name), {})

    def build(self, default: Resources) -> Any:
        """Build it with the run's resources, if there are any."""
        choice = Choice(self.name, self.options())
        # The options in the section `train` are as the file has them; those of other sections have absolute paths.
        code = OwnCode(base_dir=self.config.base_dir) if self.config else None
        try:
            return build_part(self.host, self.kind, choice, self.resources or default, path=self.name, code=code)
        except ConfigError as error:
            if choice.options:
                raise
            raise ConfigError(f"{error} (--config: a run's config with the options of {self.name!r})") from error

    def check(self, checks: Mapping[str, Check], probe: object) -> Iterator[Outcome]:
        """Run checks on a probe."""
        for name, check in checks.items():
            yield self.outcome(name, promise_of(check), partial(run_check, check, probe, self.timeout_s))

    def outcome(self, check: str, promise: str, run: Callable[[], str | None]) -> Outcome:
        """Run one check; it returns the reason of a skip."""
        outcome = Outcome(kind=self.kind, name=self.name, check=check, verdict="failed", promise=promise)
        try:
            reason = run()
        except Exception as error:  # noqa: BLE001 - a check fails by whatever the plugin raises
            text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            text = text.partition("\nTraceback (most recent call last)")[0]  # the suite under pytest shows it
            return evolve(outcome, reason=" ".join(text.split()))
        return evolve(outcome, verdict="skipped" if reason else "passed", reason=reason or "")


def _check_engine(target: _Target) -> Iterator[Outcome]:
    resources = target.resources or Resources()
    vocab_size = _vocab_size(target, resources)
    if vocab_size is None:
        reason = "it is built; to run the checks, add --config with a run's config and its model"
        yield target.outcome("is_built", "The factory builds an engine.", lambda: reason)
        return
    probe = EngineProbe(vocab_size=vocab_size)
    with EngineChecker(lambda: target.build(resources), probe, shared=True) as checker:
        for name, check in ENGINE_CHECKS.items():
            promise = promise_of(check.function)
            run = partial(run_within, partial(checker.run, name), promise, max(target.timeout_s, ENGINE_TIMEOUT_S))
            yield target.outcome(name, promise, run)


def _vocab_size(target: _Target, resources: Resources) -> int | None:
    """Return the size of the model's vocabulary, or of the engine's own; None when neither is known."""
    known = vocab_size_of(resources.model)
    if known is None:
        engine: Engine = target.build(resources)
        known = engine.capabilities.vocab_size
    return known


def _check_parser(target: _Target) -> Iterator[Outcome]:
    chat = (target.resources.chat if target.resources else None) or probe_chat()
    probe = ParserProbe(
        parser=target.build(Resources(chat=chat)), chat=chat, write_call=_hermes_call, malformed=_MALFORMED
    )
    reads_hermes = bool(probe.parse(_hermes_call("add", {}))[1])
    unknown = _NEED_CALLS | {"malformed_is_a_value"} if not reads_hermes else frozenset()
    for name, check in PARSER_CHECKS.items():
        if name in unknown:
            yield target.outcome(name, promise_of(check), lambda: _UNKNOWN_CALLS)
        else:
            yield from target.check({name: check}, probe)


def _hermes_call(name: str, arguments: Mapping[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


def _check_agent(target: _Target) -> Iterator[Outcome]:
    resources = probe_resources()
    if target.resources is not None:  # an agent may ask for tools by name
        resources = evolve(resources, tools={**resources.tools, **target.resources.tools})
    yield from _check_part(evolve(target, resources=resources))


def _check_part(target: _Target) -> Iterator[Outcome]:
    """Check a part of a kind in the table, with the examples for a part of which nothing is known."""
    kind = checks_of(target.kind)
    with TemporaryDirectory(prefix="turnwise-check-") as folder:
        resources = target.resources or kind.resources(Path(folder))
        part = Part(
            make=lambda: target.build(resources), name=target.name, resources=resources, examples=_examples(target)
        )
        part.make()  # one that cannot be built fails once, and not in each of its checks
        probe = kind.probe(part)
        refusal = _refusal(target, probe) if target.kind == "rewards" else None
        reason = f"it scores other tasks, which its own RewardSuite has: {refusal}"
        for name, check in kind.checks.items():
            if refusal and name != "fulfils_the_protocol":
                yield target.outcome(name, promise_of(check), lambda: reason)
            else:
                yield from target.check({name: check}, probe)


def _refusal(target: _Target, probe: object) -> str | None:
    """Return the text of a reward that is for other tasks than the probe's."""
    try:
        return run_check(refusal_of_tasks, probe, target.timeout_s)
    except Exception:  # noqa: BLE001 - whatever the reward raises, or that it hangs, is the result of its checks
        return None


def _examples(target: _Target) -> tuple[Any, ...]:
    """Return the examples for a part of which nothing is known; a reward gets the first tasks of the config."""
    usual = checks_of(target.kind).usual
    if target.kind != "rewards" or target.config is None:
        return usual
    try:
        from turnwise_task_files import load_tasks
    except ImportError as error:
        raise ConfigError("a check with the tasks of a config needs: pip install turnwise-task-files") from error
    tasks = load_tasks(target.config)[: len(usual)]
    return tuple(
        evolve(example, task=task, ground_truth=task.ground_truth) for example, task in zip(usual, tasks, strict=False)
    )


def _choices_in(section: object, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the options of each choice of a name in a section that belongs to a plugin."""
    if isinstance(section, Mapping):
        if section.get("name") == name:
            yield {key: value for key, value in section.items() if key != "name"}
        for value in section.values():
            yield from _choices_in(value, name)
    elif isinstance(section, list | tuple):
        for value in section:
            yield from _choices_in(value, name)


def _check_environment(target: _Target) -> Iterator[Outcome]:
    [point] = {each.value: each for each in entry_points(group=GROUP, name=target.name)}.values()
    agents = [target.config.agent, *target.config.agents.values()] if target.config else []
    own = [each.options for each in agents if each.options.get("environment") == target.name]
    options = own[0].get("options", {}) if own else {}
    yield from target.check(ENVIRONMENT_CHECKS, EnvironmentProbe(make_environment=lambda: point.load()(**options)))


def _check_wrapper(target: _Target) -> Iterator[Outcome]:
    """Check the hooks of a plugin that wraps parts, with the section of the config."""
    options = target.config.sections.get(target.name, {}) if target.config else {}
    section: object = structure(options, target.host.sections[target.name].options, path=target.name)
    probe = WrapperProbe.of(target.host, target.name, lambda: section)
    yield from target.check(WRAPPER_CHECKS, probe)


def _check_added(target: _Target) -> Iterator[Outcome]:
    """Check a part of a kind that a plugin added."""
    checks = target.host.specs.kinds[target.kind].checks
    make = partial(target.build, Resources(chat=probe_chat()))
    if not checks:
        reason = f"it is built; parts of the kind {target.kind!r} have no checks"
        make()
        yield target.outcome("is_built", "The factory builds it.", lambda: reason)
        return
    module, _, name = checks.partition(":")
    yield from target.check(*getattr(importlib.import_module(module), name)(make))


_RUNNERS: Mapping[str, Callable[[_Target], Iterator[Outcome]]] = {
    **dict.fromkeys(KINDS, _check_part),
    "agents": _check_agent,
    "engines": _check_engine,
    "tool_parsers": _check_parser,
    _ENVIRONMENTS: _check_environment,
    _WRAPPERS: _check_wrapper,
}
