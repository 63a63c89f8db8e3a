"""The calculator agent as a graph of LangGraph, over Chat Completions."""

import asyncio
import json
import os
from contextlib import suppress
from typing import Any

from calculator import calculator
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

# Shared: clients of HTTP take longer to make than a call.
HTTP = {"http_client": DefaultHttpxClient(), "http_async_client": DefaultAsyncHttpxClient()}


async def solve(messages: list[Any], model: str, base_url: str | None = None, api_key: str | None = None) -> None:
    """Solve a task; without URL and key the client reads OPENAI_BASE_URL and OPENAI_API_KEY."""
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key, **HTTP).bind_tools([calculator])

    async def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    with suppress(GraphRecursionError):  # 4 calls of the model, and the tools between them
        await graph.compile().ainvoke({"messages": messages}, {"recursion_limit": 8})


if __name__ == "__main__":
    asyncio.run(solve(json.loads(os.environ["TURNWISE_TASK"])["messages"], os.environ["TURNWISE_MODEL"]))
