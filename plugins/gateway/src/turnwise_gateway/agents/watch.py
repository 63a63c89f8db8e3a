"""Waits for the end of a session's agent, or for the limit that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from turnwise.errors import BudgetExhausted, DeadlineExceeded, PromptTooLongError, TurnwiseError, describe
from turnwise.record.limit import PROMPT
from turnwise_gateway.agents.reported import describe_refusal
from turnwise_gateway.config import AgentLimits
from turnwise_gateway.programs.program import ProgramFailedError
from turnwise_gateway.refusal import CallRefusedError
from turnwise_gateway.session.session import Session


async def wait_for_agent(agent: Coroutine[Any, Any, None], session: Session, config: AgentLimits) -> None:
    """
    Run an agent and wait until its calls are delivered.

    Raises:
        PromptTooLongError: the first prompt is longer than the run allows.
        BudgetExhausted: the session ran out of budget, or of context and the agent failed.
        DeadlineExceeded: the attempt took too long, or the agent made no call for too long.
        ProgramFailedError: the agent failed after a call was refused.
    """
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_run(agent, session))
        watching = group.create_task(_wait_for_limit(session, config))
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        error = running.result() if running.done() else watching.result()
        running.cancel()
        watching.cancel()
    if session.tools.has_finished and session.error is None:  # the agent is not to blame if it fails without its model
        return
    refusal = session.exhausted
    # The engine and the limits come first: an agent whose calls are refused fails for that reason.
    if session.error is not None:
        raise session.error
    if refusal is not None and isinstance(refusal.__cause__, PromptTooLongError) and not session.transcript:
        raise refusal.__cause__  # the run does not take the agent's first prompt
    if refusal is not None and (refusal.kind == "budget_exhausted" or error is not None):
        if session.refused is not None and not session.has_turn:  # its budget was spent on refused calls
            raise ProgramFailedError(describe_refusal(session)) from error
        raise _name_limit(refusal)
    refused = session.refused
    if (
        error is not None
        and session.has_turn
        and refused is not None
        and isinstance(refused.__cause__, BudgetExhausted)
    ):
        raise _name_limit(refused)  # of the pictures of a record
    if error is not None:
        raise _add_refusal(error, describe_refusal(session))


def _add_refusal(error: Exception, refused: str) -> Exception:
    """Return the error of an agent with the refusal that it may come from; libraries quote the refusal themselves."""
    if not refused or refused.partition(": ")[2] in str(error):
        return error
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded(f"{error}; {refused}")
    if isinstance(error, TurnwiseError):
        return error
    text = str(error) if isinstance(error, ProgramFailedError) else describe(error)
    failed = ProgramFailedError(f"{text}; {refused}")
    failed.__cause__ = error
    return failed


def _name_limit(refusal: CallRefusedError) -> BudgetExhausted:
    """Return the end of an episode whose call was refused, with the limit that the refusal comes from."""
    cause = refusal.__cause__
    if isinstance(cause, PromptTooLongError):
        return BudgetExhausted(refusal.message, limit=PROMPT, value=cause.max_tokens)
    named = cause if isinstance(cause, BudgetExhausted) else BudgetExhausted()
    return BudgetExhausted(refusal.message, limit=named.limit, value=named.value)


async def _run(agent: Coroutine[Any, Any, None], session: Session) -> Exception | None:
    """Return the error of an agent, or None at its good end."""
    try:
        await agent
    except Exception as error:  # noqa: BLE001 - it may follow from a refusal, which then is the reason
        return error
    session.others.end()  # the agent has ended, so nothing reads the answers of other servers
    await session.settle()  # the transport may still hold the last turn
    return None


async def _wait_for_limit(session: Session, config: AgentLimits) -> Exception | None:
    """Return the error that ends an agent before it ends itself; None if a tool has ended the episode."""
    now = asyncio.get_running_loop().time
    # Without a limit for idle agents, this task need not run at every call.
    event = session.ending if config.idle_s is None and config.start_s is None else session.changed
    started, grace_end = now(), None
    while session.error is None:
        refusal = session.exhausted
        is_over = session.tools.has_finished or (refusal is not None and refusal.kind == "budget_exhausted")
        if is_over and grace_end is None:
            grace_end = now() + config.exit_grace_s
        idle_end = now() + config.idle_s if config.idle_s is not None and session.is_idle else None
        start_end = started + config.start_s if config.start_s is not None and session.num_calls == 0 else None
        deadline = started + config.session_s if config.session_s is not None else None
        limits = [
            (end, error)
            for end, error in (
                (grace_end, BudgetExhausted("the agent went on after its budget was spent")),
                (start_end, DeadlineExceeded(f"the agent made no call in its first {config.start_s} s")),
                (idle_end, DeadlineExceeded(f"the agent made no call for {config.idle_s} s")),
                (deadline, DeadlineExceeded(f"the agent took longer than {config.session_s} s")),
            )
            if end is not None
        ]
        nearest, error = min(limits, key=lambda limit: limit[0], default=(None, None))
        try:
            async with asyncio.timeout_at(nearest):
                event.clear()
                await event.wait()
        except TimeoutError:
            if error is not None:
                return error
    return session.error
