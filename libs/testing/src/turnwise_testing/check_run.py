"""
Runs the conformance checks of a plugin without pytest, for ``turnwise check NAME``.

Options and resources of a check come from a run's config; without one the checks use defaults: engines
need a config with a model; parsers are taken to read Hermes' calls, and when they do not, the checks that write calls
are skipped and say so; rewards are asked about a few common answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from attrs import evolve, frozen

from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part
from turnwise.config.run import RunConfig
from turnwise.errors import ConfigError, PluginError
from turnwise.plugin.host import Host, Kind
from turnwise.plugin.registry import did_you_mean
from turnwise.protocols import Resources
from turnwise_testing.agent_checks import AGENT_CHECKS
from turnwise_testing.agent_probe import AgentProbe, probe_chat, probe_resources
from turnwise_testing.engine_checks import ENGINE_CHECKS, EngineChecker
from turnwise_testing.engine_probe import EngineProbe
from turnwise_testing.parser_checks import PARSER_CHECKS, ParserProbe
from turnwise_testing.reward_checks import REWARD_CHECKS, RewardExample, RewardProbe

Verdict = Literal["passed", "failed", "skipped"]
_CHECKED: tuple[Kind, ...] = ("engines", "tool_parsers", "agents", "rewards")
_NEED_CALLS = frozenset({"a_good_call_is_found", "calls_keep_their_order", "end_of_turn_changes_nothing"})
_MALFORMED = ('<tool_call>{"name": </tool_call>', "<tool_call>[]</tool_call>", '<tool_call>{"name": "add"')
_EXAMPLES = (
    RewardExample(answer="The answer is 42.", ground_truth="42"),
    RewardExample(answer="\\boxed{41}", ground_truth="42"),
    RewardExample(answer="", ground_truth="42"),
)


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
    """

    kind: Kind
    name: str
    check: str
    verdict: Verdict
    reason: str = ""


def run_checks(host: Host, name: str, config: RunConfig | None, resources: Resources | None) -> Iterator[Outcome]:
    """
    Check a registered name, or all that a plugin registers, and yield each outcome as it is known.

    Args:
        host: with the plugin loaded.
        name: a registered name, such as `hermes`, or a plugin's, such as `hermes_parser`.
        config: whose sections give the options; defaults when None.
        resources: for the factories of the parts; the test kit's own when None.

    Raises:
        PluginError: nothing of that name can be checked.
        ConfigError: an engine is to be checked and there is no config.
    """
    for kind, registered in targets(host, name):
        yield from _RUNNERS[kind](_Target(host, kind, registered, config, resources))


def targets(host: Host, name: str) -> list[tuple[Kind, str]]:
    """Return the (kind, registered name) pairs of a name that have checks."""
    found = [(kind, name) for kind in _CHECKED if name in host.registry(kind)]
    for plugin in host.plugins:
        if plugin.name == name and plugin.state != "ok":
            raise PluginError(f"plugin {name!r} is broken: {plugin.error}")
        if plugin.name == name:
            found += [(kind, each) for kind in _CHECKED for each in plugin.registers.get(kind, ())]
    if not found:
        known = {each for kind in _CHECKED for each in host.registry(kind).names()}
        known |= {plugin.name for plugin in host.plugins if plugin.registers.keys() & set(_CHECKED)}
        raise PluginError(f"nothing named {name!r} can be checked{did_you_mean(name, tuple(sorted(known)))}")
    return list(dict.fromkeys(found))


@frozen
class _Target:
    """One registered name, and how to build it."""

    host: Host
    kind: Kind
    name: str
    config: RunConfig | None
    resources: Resources | None

    def options(self) -> Mapping[str, Any]:
        """Return the options that the config's sections give this name."""
        config = self.config
        if config is None:
            return {}
        sections = (config.engine, config.parser, config.agent, config.reward, *config.agents.values())
        chosen = [section for section in sections if isinstance(section, Choice) and section.name == self.name]
        return chosen[0].options if chosen else {}

    def build(self, default: Resources) -> Any:
        """Build it."""
        choice = Choice(self.name, self.options())
        return build_part(self.host, self.kind, choice, self.resources or default, path=self.name)

    def outcome(self, check: str, run: Callable[[], str | None]) -> Outcome:
        """Run one check; it returns the reason of a skip."""
        try:
            reason = run()
        except Exception as error:  # noqa: BLE001 - a check fails by whatever the plugin raises
            text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            return Outcome(kind=self.kind, name=self.name, check=check, verdict="failed", reason=" ".join(text.split()))
        verdict: Verdict = "skipped" if reason else "passed"
        return Outcome(kind=self.kind, name=self.name, check=check, verdict=verdict, reason=reason or "")


def _awaited(check: Callable[[Any], Coroutine[Any, Any, str | None]], probe: Any) -> str | None:
    return asyncio.run(check(probe))


def _check_engine(target: _Target) -> Iterator[Outcome]:
    if target.resources is None or target.resources.model.path is None:
        raise ConfigError(f"engine {target.name!r} needs a model: add --config with a run's config")
    probe = EngineProbe(vocab_size=_vocab_size(target.resources))
    resources = target.resources
    with EngineChecker(lambda: target.build(resources), probe, shared=True) as checker:
        for check in ENGINE_CHECKS:
            yield target.outcome(check, partial(checker.run, check))


def _vocab_size(resources: Resources) -> int:
    if resources.model.path is None:
        raise ConfigError("model.path is not set")
    config = json.loads((resources.model.path / "config.json").read_text(encoding="utf-8"))
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def _check_parser(target: _Target) -> Iterator[Outcome]:
    chat = (target.resources.chat if target.resources else None) or probe_chat()
    probe = ParserProbe(
        parser=target.build(Resources(chat=chat)), chat=chat, write_call=_hermes_call, malformed=_MALFORMED
    )
    reads_hermes = bool(probe.parse(_hermes_call("add", {}))[1])
    for name, check in PARSER_CHECKS.items():
        if not reads_hermes and name in _NEED_CALLS | {"malformed_is_a_value"}:
            yield target.outcome(name, lambda: "how it writes calls is not known; its own ToolParserSuite says it")
        else:
            yield target.outcome(name, partial(check, probe))


def _hermes_call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


def _check_agent(target: _Target) -> Iterator[Outcome]:
    resources = probe_resources()
    if target.resources is not None:  # an agent may ask for tools by name
        resources = evolve(resources, tools={**resources.tools, **target.resources.tools})
    kit = _Target(target.host, target.kind, target.name, target.config, resources)
    probe = AgentProbe(make_agent=lambda: kit.build(resources), resources=resources)
    for name, check in AGENT_CHECKS.items():
        yield target.outcome(name, partial(_awaited, check, probe))


def _check_reward(target: _Target) -> Iterator[Outcome]:
    chat = probe_chat()
    probe = RewardProbe(make_reward=lambda: target.build(Resources(chat=chat)), examples=_EXAMPLES, chat=chat)
    for name, check in REWARD_CHECKS.items():
        yield target.outcome(name, partial(_awaited, check, probe))


_RUNNERS: Mapping[Kind, Callable[[_Target], Iterator[Outcome]]] = {
    "engines": _check_engine,
    "tool_parsers": _check_parser,
    "agents": _check_agent,
    "rewards": _check_reward,
}
