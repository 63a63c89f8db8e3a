"""A fake of verl's server client, with the same method and the same output type."""

import re
from pathlib import Path
from types import SimpleNamespace

EXAMPLE = Path(__file__).parents[3] / "examples/calculator.yaml"


class ScriptedServers:
    """
    Calls the calculator with the question's expression and then answers with the result.

    Attributes:
        requests: (request id, prompt ids, sampling parameters) of every request.
    """

    def __init__(self, chat, counter, *, log_probs=True):
        self.chat = chat
        self.requests = []
        self._counter = counter
        self._log_probs = log_probs

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_options):
        """Return an output like `verl.workers.rollout.llm_server.LLMServerClient.generate`."""
        self.requests.append((request_id, list(prompt_ids), dict(sampling_params)))
        text = self.chat.tokenizer.decode(prompt_ids)
        results = re.findall(r"<tool_response>\s*(-?\d+)", text)
        if results:
            wrong = next(self._counter) % 3 == 2
            answer = f"The answer is {int(results[-1]) + wrong}.<|im_end|>"
        else:
            expression = re.findall(r"([0-9][0-9 ()*+-]*[0-9)])", text)[-1]
            answer = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
            answer += "<|im_end|>"
        ids = self.chat.tokenizer.encode(answer)[: sampling_params.get("max_tokens", 4096)]
        return SimpleNamespace(
            token_ids=ids,
            log_probs=[-0.25] * len(ids) if self._log_probs else None,
            stop_reason="completed",
            extra_fields={"global_steps": 7},
        )
