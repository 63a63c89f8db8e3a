"""Agent loops as users of verl write them; `loop` of the tests' configs. Importing it needs verl."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register


@register("echo_agent")
class EchoLoop(AgentLoopBase):
    """Two turns with an observation between them, in the form of verl 0.6 to 0.8."""

    def __init__(self, *args, turns: int = 2, **kwargs):
        super().__init__(*args, **kwargs)
        self.turns = turns
        self.response_length = self.config.actor_rollout_ref.rollout.response_length
        self.limit = self.config.actor_rollout_ref.rollout.multi_turn.max_tool_response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.apply_chat_template(messages)
        ids, mask, logprobs = list(prompt_ids), [], []
        for turn in range(self.turns):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 12}
            )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            logprobs += output.log_probs
            if turn == self.turns - 1:
                break
            seen = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)[: self.limit]
            added = await self.apply_chat_template([{"role": "tool", "content": seen}], remove_system_prompt=True)
            ids += added
            mask += [0] * len(added)
            logprobs += [0.0] * len(added)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids[len(prompt_ids) :][: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=logprobs[: self.response_length],
            reward_score=float(len(kwargs["reward_model"]["ground_truth"])),
            num_turns=2 * self.turns,
            metrics=AgentLoopMetrics(),
            extra_fields={"reward_extra_info": {"echoed": 1.0, "split": kwargs["extra_info"]["split"]}},
        )


class OldLoop(AgentLoopBase):
    """One turn, in the form of verl 0.5: the messages are the first argument, and a server returns ids."""

    async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            ),
        )
        response_ids = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        assert response_ids == response_ids.token_ids  # as code between verl 0.5 and 0.6 reads them
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=[1] * len(response_ids),
            num_turns=2,
            metrics={},
        )


class TokenLoop(AgentLoopBase):
    """One turn, in the form of verl 0.9: the base class encodes."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs) -> AgentLoopOutput:
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params, priority=priority
        )
        merged, mask, logprobs = await self.ct_merge_assistant_token(
            prompt_ids, output.token_ids, [], [], assistant_logprobs=output.log_probs
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=merged.token_ids[len(prompt_ids) :],
            response_mask=mask,
            response_logprobs=logprobs,
            metrics=AgentLoopMetrics(num_preempted=output.num_preempted or 0),
            extra_fields=output.extra_fields,
        )


class WrongLoop(EchoLoop):
    """Trains its own observation."""

    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.response_mask[output.response_mask.index(0)] = 1
        return output


class RaisingLoop(AgentLoopBase):
    """Fails after a turn."""

    async def run(self, sampling_params, **kwargs):
        await self.server_manager.generate(request_id="x", prompt_ids=[5, 6], sampling_params=sampling_params)
        raise RuntimeError("the tool is broken")


class NoLoop:
    """Has no `run`."""
