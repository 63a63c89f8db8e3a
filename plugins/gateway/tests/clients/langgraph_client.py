"""A ReAct graph of LangGraph: arguments and output as of the other clients."""

import asyncio
import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, dialect, stream):
    model = ChatOpenAI(
        model="tiny",
        base_url=f"{url}/v1",
        api_key=key,
        streaming=stream == "stream",
        use_responses_api=dialect == "responses",
    ).bind_tools([add])

    async def call(state):
        return {"messages": [await model.ainvoke([("system", "You add."), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "model")
    last = (await graph.compile().ainvoke({"messages": [("user", "Add 1 and 2.")]}))["messages"][-1]
    return last.text if isinstance(last.text, str) else last.text()


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
