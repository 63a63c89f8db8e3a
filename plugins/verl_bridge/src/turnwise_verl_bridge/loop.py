"""
The agent loop `turnwise` of verl: a sample becomes an episode of the run that verl's config names.

verl loads this module by its entry point `verl.plugins` and keeps its errors to itself; a run that names the loop and
was not given it says that it is not registered.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register

from turnwise_verl_bridge.rows import loop_outputs
from turnwise_verl_bridge.runs import Sampling, manager_for, task_of


@register("turnwise")
class TurnwiseAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl's classes are Any to mypy
    """
    Runs turnwise agents on verl's servers.

    Choose it with `actor_rollout_ref.rollout.agent.default_agent_loop=turnwise`, or per row with the column
    `agent_name`; the column `turnwise_agent` names one of the run's agents.
    """

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any:
        """
        Run one episode.

        Returns:
            Its `AgentLoopOutput`, or a list when the agent made several trajectories (V1 of verl takes these).

        Raises:
            InfrastructureError: the episode failed; verl counts it as a failure.
        """
        manager = manager_for(self.config, self.server_manager, Sampling.of(sampling_params))
        task = task_of(fields, str(fields.get("uid") or uuid4().hex))
        step = int(fields.get("global_steps") or 0)
        outputs = [
            output async for result in manager.stream([task], global_step=step) for output in loop_outputs(result)
        ]
        return outputs[0] if len(outputs) == 1 else outputs
