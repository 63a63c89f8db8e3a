"""An agent of smolagents: arguments and output as of the other clients."""

import json
import sys

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: float, b: float) -> float:
    """
    Add two numbers.

    Args:
        a: First.
        b: Second.
    """
    return a + b


def main(url, key, _dialect, stream):
    model = OpenAIServerModel(model_id="tiny", api_base=f"{url}/v1", api_key=key, client_kwargs={"max_retries": 0})
    streams = stream == "stream"
    agent = ToolCallingAgent([add], model, stream_outputs=streams, verbosity_level=LogLevel.OFF, max_steps=5)
    return str(agent.run("Add 1 and 2."))


try:
    print(json.dumps({"answer": main(*sys.argv[1:])}))
except Exception as error:  # noqa: BLE001  # the test reads any error from the output
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
