"""An agent of the Claude Agent SDK, which brings Claude Code: arguments and output as of the other clients."""

import asyncio
import json
import sys
import tempfile

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool


@tool("add", "Add two numbers.", {"a": float, "b": float})
async def add(arguments):
    return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}


async def main(url, key, _dialect, stream):
    with tempfile.TemporaryDirectory() as folder:
        options = ClaudeAgentOptions(
            model="tiny",
            system_prompt="You add.",
            mcp_servers={"sums": create_sdk_mcp_server("sums", tools=[add])},
            allowed_tools=["mcp__sums__add"],
            tools=[],
            setting_sources=[],
            cwd=folder,
            include_partial_messages=stream == "stream",
            env={
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_AUTH_TOKEN": key,
                "ANTHROPIC_API_KEY": "",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "HOME": folder,
            },
        )
        answer = ""
        async for message in query(prompt="Add 1 and 2.", options=options):
            if isinstance(message, ResultMessage):
                answer = message.result
        return answer


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
