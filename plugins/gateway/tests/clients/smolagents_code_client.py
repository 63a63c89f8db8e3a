"""An agent of smolagents that writes its actions as Python code; the output is as of the other clients."""

import json
import sys

from smolagents import CodeAgent, LogLevel, OpenAIServerModel


def main(url, key, _dialect, stream):
    """Return the last answer."""
    model = OpenAIServerModel(model_id="tiny", api_base=f"{url}/v1", api_key=key, client_kwargs={"max_retries": 0})
    streams = stream == "stream"
    agent = CodeAgent([], model, stream_outputs=streams, verbosity_level=LogLevel.OFF, max_steps=5)
    return str(agent.run("Add 1 and 2."))


print(json.dumps({"answer": main(*sys.argv[1:])}))
