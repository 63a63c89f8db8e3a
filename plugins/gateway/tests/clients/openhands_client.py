"""An agent of the OpenHands SDK: arguments and output as of the other clients."""

import json
import sys
import tempfile

from openhands.sdk import LLM, Action, Agent, Conversation, Observation, Tool, ToolDefinition, register_tool
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.sdk.tool import ToolExecutor


class AddAction(Action):
    """Two numbers."""

    a: float
    b: float


class AddObservation(Observation):
    """Their sum."""


class AddExecutor(ToolExecutor):
    """Adds."""

    def __call__(self, action, _conversation=None):
        return AddObservation.from_text(str(action.a + action.b))


class AddTool(ToolDefinition):
    """The tool `add`."""

    name = "add"

    @classmethod
    def create(cls, _state=None, **_options):
        described = cls(
            description="Add two numbers.",
            action_type=AddAction,
            observation_type=AddObservation,
            executor=AddExecutor(),
        )
        return [described]


def main(url, key, dialect, stream):
    wire = {"chat": "openai", "messages": "anthropic"}[dialect]
    base = url if dialect == "messages" else f"{url}/v1"
    llm = LLM(model=f"{wire}/tiny", base_url=base, api_key=key, usage_id="agent", stream=stream == "stream")
    register_tool("AddTool", AddTool)
    agent = Agent(llm=llm, tools=[Tool(name="AddTool")], include_default_tools=[])
    with tempfile.TemporaryDirectory() as folder:
        callbacks = {"token_callbacks": [lambda _chunk: None]} if stream == "stream" else {}
        conversation = Conversation(agent=agent, workspace=folder, visualizer=None, **callbacks)
        conversation.send_message("Add 1 and 2.")
        conversation.run()
        return get_agent_final_response(conversation.state.events)


print(json.dumps({"answer": main(*sys.argv[1:])}))
