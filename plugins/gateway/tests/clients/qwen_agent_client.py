"""Qwen-Agent's `Assistant`, which writes the tools into the prompt and reads calls from the text."""

import json
import sys
from typing import ClassVar

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool


class Add(BaseTool):
    """Adds two numbers."""

    name = "add"
    description = "Add two numbers."
    parameters: ClassVar = {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    }

    def call(self, params, **_options):
        """Return the sum."""
        numbers = json.loads(params)
        return str(numbers["a"] + numbers["b"])


def main(url, key, _dialect, _stream):
    """Return the last answer; the agent always streams."""
    model = {"model": "tiny", "model_type": "oai", "model_server": f"{url}/v1", "api_key": key}
    agent = Assistant(llm=model, function_list=[Add()], system_message="You add.")
    for answers in agent.run(messages=[{"role": "user", "content": "Add 1 and 2."}]):
        last = answers[-1]
    return last["content"]


print(json.dumps({"answer": main(*sys.argv[1:])}))
