"""
verl's agent loop `turnwise`: runs each sample as an episode.

verl imports this module by the entry point `verl.plugins` and ignores import errors; a run that uses the loop then
fails because it is not registered.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register

from turnwise_verl_bridge.rows import to_loop_outputs
from turnwise_verl_bridge.runs import Sampling, build_task, get_manager


@register("turnwise")
class TurnwiseAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl's classes are Any to mypy
    """
    Runs turnwise agents on verl's servers.

    Select it with `actor_rollout_ref.rollout.agent.default_agent_loop=turnwise`, or per row with the column
    `agent_name`. The column `turnwise_agent` then names one of the run's agents.
    """

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any:
        """
        Run one episode.

        Returns:
            An `AgentLoopOutput`, or a list of them for several trajectories (verl's V1 only).

        Raises:
            InfrastructureError: the episode failed; verl counts it as a failure.
        """
        manager = get_manager(self.config, self.server_manager, Sampling.from_verl(sampling_params))
        task = build_task(fields, str(fields.get("uid") or uuid4().hex))
        step = int(fields.get("global_steps") or 0)
        outputs = [
            output async for result in manager.stream([task], global_step=step) for output in to_loop_outputs(result)
        ]
        return outputs[0] if len(outputs) == 1 else outputs
