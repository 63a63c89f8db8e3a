"""
Requirements of the hooks `wrap_*` of every plugin, as plain functions without pytest.

A check takes a `WrapperProbe` and raises `AssertionError` with a text that describes the failure. The episodes are
run by the real driver, whose scripted model calls a tool; the driver compares every record with the sampled tokens. Not
covered: whether the changes of a wrapper are right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from turnwise.config.file import to_dict
from turnwise.config.parts import Choice
from turnwise.config.run import DataConfig, RunConfig
from turnwise.plugin.host import Host, load
from turnwise.plugin.wrapping import WRAPPED
from turnwise.protocols import Resources, RunInfo
from turnwise.types import GenerateRequest, PluginRecipe, SamplingParams, Status
from turnwise_testing.checks.check import register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.agent import AgentProbe, Run, make_task, probe_chat, probe_resources
from turnwise_testing.probes.engine import expect, expect_equal
from turnwise_testing.probes.wrapped_parts import PARTS, Length, PartExample, ToolLoop

_MIDDLEWARE = "middleware"
"""The entry-point name of the plugin with that section."""
Wrap = Callable[[str, Any], Any]
"""Returns a part of a registry inside of its wrapper, or the part itself."""


@frozen(kw_only=True)
class WrapperProbe:
    """
    The probe of wrappers.

    Attributes:
        make_wrap: makes the wrappers of a new process.
        num_tasks: number of episodes of the checks.
    """

    make_wrap: Callable[[], Wrap]
    num_tasks: int = field(default=6)

    @classmethod
    def of(cls, host: Host, plugin: str, make_section: Callable[[], object]) -> WrapperProbe:
        """Return the probe of a plugin's hooks; `make_section` makes the section that they get."""
        config = RunConfig(data=DataConfig(path="tasks.jsonl"), agent=Choice("probe"), engine=Choice("probe"))

        def make_wrap() -> Wrap:
            resources = Resources(chat=probe_chat())
            run = RunInfo(config=to_dict(config), role="driver", section=make_section(), resources=resources)

            def wrap(kind: str, part: object) -> Any:
                if plugin not in host.wrapping.plugins(kind):
                    return part
                return host.wrapping.wrap(plugin, kind, part, host.registry(kind).contract or object, run)

            return wrap

        return cls(make_wrap=make_wrap)

    async def run(self, number: int, wrap: Wrap | None = None) -> Run:
        """Run an episode whose parts are wrapped."""
        wrap, plain = wrap or self.make_wrap(), probe_resources()
        tools = {name: wrap("tools", tool) for name, tool in plain.tools.items()}
        resources = evolve(plain, tools=tools, parser=wrap("tool_parsers", plain.parser))
        agents = AgentProbe(make_agent=lambda: wrap("agents", ToolLoop(resources)), resources=resources)
        engine = wrap("engines", agents.engine())
        await engine.start()
        run = await agents.run(make_task(number), engine=engine, reward=wrap("rewards", Length()))
        await engine.stop()
        fault = run.result.fault
        text = f"{fault.owner} {fault.kind}: {fault.message}\n{fault.traceback}" if fault else ""
        expect(run.result.status is not Status.FAILED, f"the episode {number} failed: {text}")
        return run


def middleware_probe(make_middleware: Callable[[], object]) -> WrapperProbe:
    """Return the probe of one part of the section `middleware`, which acts through the hooks of that plugin."""
    host = load(PluginRecipe(allow=(_MIDDLEWARE,)))
    return WrapperProbe.of(host, _MIDDLEWARE, lambda: (make_middleware(),))


WrapperCheck = Callable[[WrapperProbe], Coroutine[Any, Any, None]]

WRAPPER_CHECKS: dict[str, WrapperCheck] = {}
"""Every check by the name of its function without `check_`."""
MIDDLEWARE = PartChecks(
    checks=WRAPPER_CHECKS,
    probe=lambda part: middleware_probe(part.make),
)


_check = register(WRAPPER_CHECKS)


@_check
async def check_wraps_a_part(probe: WrapperProbe) -> None:
    """The hooks wrap a part of at least one kind."""
    wrap = probe.make_wrap()
    kinds = [each.kind for each in PARTS if wrap(each.kind, part := each.make()) is not part]
    expect(bool(kinds), f"no part is wrapped: expected a hook that returns another {', '.join(WRAPPED)}")


@_check
async def check_wrapped_parts_keep_their_methods(probe: WrapperProbe) -> None:
    """A wrapper has each method of its protocol, and those optional ones that the part inside has, and no others."""
    wrap = probe.make_wrap()
    for example in PARTS:
        _compare_methods(example, wrap)


def _compare_methods(example: PartExample, wrap: Wrap) -> None:
    part = example.make()
    outer = wrap(example.kind, part)
    where = f"a wrapper of the kind {example.kind}"
    for name in example.methods:
        expect(hasattr(outer, name), f"{where} has no {name}, which its protocol has")
        same = callable(getattr(outer, name)) == callable(getattr(part, name))
        expect(same, f"{where} has {name} as a method where its part has a value, or the other way round")
    for name in example.optional:
        lost = "loses" if hasattr(part, name) else "adds"
        expect(hasattr(outer, name) == hasattr(part, name), f"{where} {lost} the optional {name} of its part")
    for protocol in example.protocols:
        same = isinstance(outer, protocol) == isinstance(part, protocol)
        expect(same, f"{where} and its part are not both a {protocol.__name__}: derive it from turnwise.Wrapper")


@_check
async def check_sampled_tokens_stay(probe: WrapperProbe) -> None:
    """Every sampled token is in a record as it was sampled, whatever the wrappers do with texts and scores."""
    for number in range(probe.num_tasks):
        run = await probe.run(number)
        sampled = [token for answer in run.answers for token in answer.token_ids.tolist()]
        recorded = [
            int(token) for record in run.result.trajectories for token in record.response_ids[record.response_mask == 1]
        ]
        expect_equal(recorded, sampled, "sampled tokens in the record")


@_check
async def check_results_of_an_engine_stay(probe: WrapperProbe) -> None:
    """A wrapped engine returns the tokens and log-probabilities that the engine itself returns."""
    results = []
    for engine in (ScriptedEngine({(1,): [5, 6, 7]}), probe.make_wrap()("engines", ScriptedEngine({(1,): [5, 6, 7]}))):
        await engine.start()
        request = GenerateRequest(
            request_id="r", trajectory_id="t", token_ids=np.array([1], np.int32), sampling=SamplingParams(max_tokens=3)
        )
        result = await engine.generate(request)
        results.append((result.token_ids.tolist(), result.logprobs.tolist(), result.finish_reason))
        await engine.stop()
    expect_equal(results[1], results[0], "the result of a wrapped engine")


@_check
async def check_is_repeatable(probe: WrapperProbe) -> None:
    """The same episode has the same records and scores, by one object or by several."""
    wrap = probe.make_wrap()
    first = [_outcome(await probe.run(number, wrap)) for number in range(probe.num_tasks)]
    again = [_outcome(await probe.run(number, wrap)) for number in reversed(range(probe.num_tasks))]
    expect_equal(again[::-1], first, "records of the same episodes again")
    new = [_outcome(await probe.run(number)) for number in range(probe.num_tasks)]
    expect_equal(new, first, "records of the same episodes by new objects")


@_check
async def check_many_at_once_do_not_mix(probe: WrapperProbe) -> None:
    """One object serves many episodes at once, each as it does alone."""
    wrap = probe.make_wrap()
    alone = [_outcome(await probe.run(number, wrap)) for number in range(probe.num_tasks)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(probe.run(number, wrap)) for number in [*range(probe.num_tasks)] * 2]
    expect_equal([_outcome(task.result()) for task in tasks], alone * 2, "records of episodes at once")


@_check
async def check_the_lifecycle_of_an_engine_passes(probe: WrapperProbe) -> None:
    """A replica starts, sleeps, wakes up and stops inside of the wrapper."""
    outer = probe.make_wrap()("engines", ScriptedEngine())
    await outer.start()
    await outer.sleep(1)
    await outer.wake_up()
    await outer.stop()
    await outer.stop()


def _outcome(run: Run) -> tuple[object, ...]:
    return run.records, run.result.scores, run.result.messages, run.result.status


async def run_wrapper_checks(probe: WrapperProbe) -> None:
    """Run checks one after the other; the first that fails raises."""
    for check in WRAPPER_CHECKS.values():
        await check(probe)
