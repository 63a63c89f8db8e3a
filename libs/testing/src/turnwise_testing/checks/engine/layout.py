"""Checks of engines that accept layouts: properties of every model."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from turnwise.layout import Layout
from turnwise.protocols import Engine
from turnwise.types import GenerateRequest
from turnwise_testing.checks.engine.check import engine_check
from turnwise_testing.probes.engine import GREEDY, EngineProbe, expect_equal, expect_refusal


@engine_check(needs="layouts")
async def check_layout_without_paths_is_plain_text(engine: Engine, probe: EngineProbe) -> None:
    """A layout with no paths changes nothing."""
    plain = await probe.ask(engine, probe.request())
    laid_out = await probe.ask(engine, evolve(probe.request(), layout=Layout()))
    expect_equal(laid_out.token_ids.tolist(), plain.token_ids.tolist(), "ids with a layout of no paths")


@engine_check(needs="layouts")
async def check_order_of_paths_does_not_matter(engine: Engine, probe: EngineProbe) -> None:
    """Paths share positions and do not see each other, so text after them does not depend on their order."""
    before, first, second, after = probe.prompts[2], probe.prompts[1][1:], probe.prompts[3], probe.prompts[0]
    answers = []
    for one, other in ((first, second), (second, first)):
        start = len(before)
        ends = start + len(one), start + len(one) + len(other)
        layout = Layout(((start, start, ends[0]), (start, *ends)))
        answers.append(await probe.ask(engine, _request(probe, (*before, *one, *other, *after), layout)))
    expect_equal(answers[1].token_ids.tolist(), answers[0].token_ids.tolist(), "ids with the paths in another order")


@engine_check(needs="layouts")
async def check_layout_beyond_the_context_is_refused(engine: Engine, probe: EngineProbe) -> None:
    """A layout with a path that ends behind the context raises `EngineError`, and the engine lives on."""
    request = _request(probe, probe.prompts[0], Layout(((1, 1, len(probe.prompts[0]) + 1),)))
    await expect_refusal(engine.generate(request), "a layout beyond the context")
    await probe.ask(engine, probe.request())


def _request(probe: EngineProbe, token_ids: tuple[int, ...], layout: Layout) -> GenerateRequest:
    return evolve(probe.request(sampling=GREEDY), token_ids=np.array(token_ids, np.int32), layout=layout)
