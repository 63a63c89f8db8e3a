"""An agent of LangChain: `python langchain_client.py URL KEY DIALECT STREAM` prints its answer or its error as JSON."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def main(url, key, dialect, stream):
    uses_responses = dialect == "responses"
    model = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key=key, use_responses_api=uses_responses).bind_tools(
        [add]
    )
    messages = [HumanMessage("Add 1 and 2.")]
    while True:
        if stream == "stream":
            reply = None
            for chunk in model.stream(messages):
                reply = chunk if reply is None else reply + chunk
        else:
            reply = model.invoke(messages)
        messages.append(reply)
        if not reply.tool_calls:
            return reply.text
        for call in reply.tool_calls:
            messages.append(ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]))


try:
    print(json.dumps({"answer": str(main(*sys.argv[1:]))}))
except Exception as error:  # noqa: BLE001  # the test reads any error from the output
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
