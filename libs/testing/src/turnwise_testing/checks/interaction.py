"""
Requirements of every user simulator, as plain functions without pytest.

A check takes an `InteractionProbe` and raises `AssertionError` with a text that describes the failure.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from math import isfinite

from attrs import field, frozen

from turnwise.protocols import Interaction
from turnwise.types import Message, Reply, Task
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks, chat_resources
from turnwise_testing.probes.agent import make_task
from turnwise_testing.probes.engine import expect, expect_equal

ANSWERS = ("The answer is 42.", "", "Grüße, 世界 🌍", "I do not know.\nSorry.")
"""Answers of the model."""


@frozen(kw_only=True)
class InteractionProbe:
    """
    The probe of a user simulator.

    Attributes:
        make_interaction: builds it, as the registered factory does.
        answers: of the model, one a turn.
        task: of the episode.
        repeatable: the same conversation has the same replies; False for a simulator that samples without a seed.
    """

    make_interaction: Callable[[], Interaction]
    answers: tuple[str, ...] = ANSWERS
    task: Task = field(factory=make_task)
    repeatable: bool = True

    async def converse(self, interaction: Interaction, answers: Sequence[str]) -> list[Reply]:
        """Return the replies to some answers in one session, until the simulator ends it."""
        session = await interaction.create(self.task)
        messages: list[Message] = list(self.task.messages)
        replies: list[Reply] = []
        try:
            for answer in answers:
                messages.append({"role": "assistant", "content": answer})
                reply = await self._reply(interaction, session, messages)
                replies.append(reply)
                if reply.should_terminate:
                    break
                messages.append({"role": "user", "content": reply.content})
        finally:
            await interaction.release(session)
        return replies

    async def _reply(self, interaction: Interaction, session: object, messages: list[Message]) -> Reply:
        before = copy.deepcopy(messages)
        reply: object = await interaction.respond(session, messages)
        expect_equal(messages, before, "the conversation after respond")
        if not isinstance(reply, Reply):
            raise AssertionError(  # noqa: TRY004 - the failure of a check
                f"respond returned {reply!r}, expected a Reply"
            )
        expect(isinstance(reply.content, str), f"the content is a {type(reply.content).__name__}, not a string")
        expect(type(reply.should_terminate) is bool, f"should_terminate is {reply.should_terminate!r}")
        finite = reply.reward is None or isfinite(reply.reward)
        expect(finite, f"the reward is {reply.reward!r}, expected a finite number or None")
        return reply


INTERACTION_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
INTERACTIONS = PartChecks(
    checks=INTERACTION_CHECKS,
    probe=lambda part: InteractionProbe(make_interaction=part.make),
    resources=chat_resources,
)
_check = register(INTERACTION_CHECKS)


@_check
def check_fulfils_the_protocol(probe: InteractionProbe) -> None:
    """The factory returns an object with the methods of a user simulator."""
    made = probe.make_interaction()
    expect(isinstance(made, Interaction), f"{type(made).__name__} lacks `create`, `respond` or `release`")


@_check
async def check_replies_are_replies(probe: InteractionProbe) -> None:
    """Every answer of the model gets a `Reply`, and the conversation is left unchanged."""
    for answer in probe.answers:
        await probe.converse(probe.make_interaction(), [answer])
    await probe.converse(probe.make_interaction(), probe.answers)


@_check
async def check_session_without_a_reply_closes(probe: InteractionProbe) -> None:
    """A session without any reply can be released."""
    await probe.converse(probe.make_interaction(), [])


@_check
async def check_is_repeatable(probe: InteractionProbe) -> str | None:
    """The same conversation has the same replies, from one object or from several."""
    if not probe.repeatable:
        return "the probe says that replies differ"
    interaction = probe.make_interaction()
    first = await probe.converse(interaction, probe.answers)
    expect_equal(await probe.converse(interaction, probe.answers), first, "the replies in a second session")
    expect_equal(await probe.converse(probe.make_interaction(), probe.answers), first, "the replies of a second object")
    return None


@_check
async def check_sessions_do_not_mix(probe: InteractionProbe) -> str | None:
    """One object serves many episodes at once, each as it does alone."""
    interaction = probe.make_interaction()
    starts = range(len(probe.answers))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(probe.converse(interaction, probe.answers[start:])) for start in starts]
    if not probe.repeatable:
        return None
    for start, task in zip(starts, tasks, strict=True):
        alone = await probe.converse(probe.make_interaction(), probe.answers[start:])
        expect_equal(task.result(), alone, "the replies of a session beside others")
    return None
