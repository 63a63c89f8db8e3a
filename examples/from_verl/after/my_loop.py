"""An agent loop of verl 0.9: the model calls the run's tools until it answers."""

import json
import re
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
RESPONSE = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@register("my_agent")
class MyAgentLoop(AgentLoopBase):
    """Turns of the model alternate with calls of tools."""

    def __init__(self, *args, tools=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.tools = {tool.name: tool for tool in tools.tools}
        self.max_turns = self.rollout_config.multi_turn.max_assistant_turns or 6
        self.response_length = self.rollout_config.response_length

    async def run(self, sampling_params, **kwargs):
        """Return the ids and the mask of one trajectory."""
        schemas = [tool.tool_schema.model_dump(exclude_none=True) for tool in self.tools.values()]
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]), tools=schemas)
        request_id, ids, mask, num_turns = uuid4().hex, list(prompt_ids), [], 0
        while len(mask) < self.response_length:
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=ids, sampling_params=sampling_params
            )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            num_turns += 1
            found = CALL.search(self.tokenizer.decode(output.token_ids))
            if not found or num_turns == self.max_turns:
                break
            observation = self.tokenizer.encode(RESPONSE.format(await self.call(found[1])), add_special_tokens=False)
            if len(mask) + len(observation) >= self.response_length:
                break
            ids += observation
            mask += [0] * len(observation)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids[len(prompt_ids) :][: self.response_length],
            response_mask=mask[: self.response_length],
            num_turns=2 * num_turns,
            metrics=AgentLoopMetrics(),
        )

    async def call(self, text):
        """Return the response of a tool to a call."""
        try:
            call = json.loads(text)
            tool = self.tools[call["name"]]
        except (ValueError, KeyError) as error:
            return f"Error: {error!r}"
        instance_id, _ = await tool.create(None)
        try:
            response, _reward, _metrics = await tool.execute(instance_id, call["arguments"])
        finally:
            await tool.release(instance_id)
        return response.text
