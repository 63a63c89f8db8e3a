"""An agent of CAMEL: arguments and output as of the other clients."""

import json
import sys

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


class Characters(BaseTokenCounter):
    """Counts characters: the counter that it has by default loads its tokenizer from a server."""

    def count_tokens_from_messages(self, messages):
        return len(json.dumps(messages))

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode()


def add(a: float, b: float) -> float:
    """
    Add two numbers.

    Args:
        a (float): First.
        b (float): Second.
    """
    return a + b


def main(url, key, _dialect, stream):
    model = ModelFactory.create(
        model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        model_type="tiny",
        url=f"{url}/v1",
        api_key=key,
        token_counter=Characters(),
        model_config_dict={"stream": stream == "stream"},
    )
    agent = ChatAgent("You add.", model=model, tools=[FunctionTool(add)])
    reply = agent.step("Add 1 and 2.")
    if stream == "stream":
        *_, reply = reply
    return reply.msgs[0].content


print(json.dumps({"answer": main(*sys.argv[1:])}))
