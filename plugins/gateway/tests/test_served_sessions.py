"""Real sessions behind the server: the vendors' libraries hold a conversation in each dialect."""

import pytest
from session_scenarios import ADD, Sessions

from turnwise import Status
from turnwise_gateway.server import GatewayServer, SessionDirectory

CALLS = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'
TURN = f"<think>\nI must add.\n</think>\nFirst I add.\n{CALLS}"
NUM_TURNS = 3
USER = {"role": "user", "content": "Add 1 and 2."}


async def converse_in_chat(url, key, stream):
    """Hold the conversation in Chat Completions; return the token counts of its calls."""
    import openai

    messages, usages = [USER], []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        for _ in range(NUM_TURNS):
            request = {"model": "tiny", "messages": messages, "tools": [ADD]}
            if stream:
                options = {"include_usage": True}
                async with client.chat.completions.stream(**request, stream_options=options) as events:
                    reply = await events.get_final_completion()
            else:
                reply = await client.chat.completions.create(**request)
            message = reply.choices[0].message
            messages.append(message)
            messages += [{"role": "tool", "tool_call_id": each.id, "content": "3"} for each in message.tool_calls or ()]
            usages.append((reply.usage.prompt_tokens, reply.usage.completion_tokens))
    return usages


async def converse_in_messages(url, key, stream):
    """Hold the conversation in Messages; each count of tokens is that of the call after it."""
    import anthropic

    messages, usages = [USER], []
    tools = [{"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        for _ in range(NUM_TURNS):
            request = {"model": "tiny", "messages": messages, "tools": tools}
            counted = await client.messages.count_tokens(**request)
            if stream:
                async with client.messages.stream(**request, max_tokens=999) as events:
                    reply = await events.get_final_message()
            else:
                reply = await client.messages.create(**request, max_tokens=999)
            assert counted.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block.id for block in reply.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": each, "content": "3"} for each in calls]
            messages += [{"role": "user", "content": results}] if results else []
            usages.append((counted.input_tokens, reply.usage.output_tokens))
    return usages


async def converse_in_responses(url, key, stream):
    """Hold the conversation in Responses."""
    import openai

    items, usages = [USER], []
    tools = [{"type": "function", **ADD["function"]}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        for _ in range(NUM_TURNS):
            request = {"model": "tiny", "input": items, "tools": tools}
            if stream:
                async with client.responses.stream(**request) as events:
                    reply = await events.get_final_response()
            else:
                reply = await client.responses.create(**request)
            items += [each.to_dict() for each in reply.output]
            calls = [each.call_id for each in reply.output if each.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": each, "output": "3"} for each in calls]
            usages.append((reply.usage.input_tokens, reply.usage.output_tokens))
    return usages


async def continue_responses(url, key, stream):
    """Hold the conversation in Responses; each request names the response before, and has the new items alone."""
    import openai

    items, usages, name = [USER], [], openai.omit
    tools = [{"type": "function", **ADD["function"]}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        for _ in range(NUM_TURNS):
            request = {"model": "tiny", "input": items, "tools": tools, "previous_response_id": name}
            if stream:
                async with client.responses.stream(**request) as events:
                    reply = await events.get_final_response()
            else:
                reply = await client.responses.create(**request)
            name, calls = reply.id, [each.call_id for each in reply.output if each.type == "function_call"]
            items = [{"type": "function_call_output", "call_id": each, "output": "3"} for each in calls]
            usages.append((reply.usage.input_tokens, reply.usage.output_tokens))
    return usages


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "converse", [converse_in_chat, converse_in_messages, converse_in_responses, continue_responses]
)
def test_conversation_is_one_record_with_its_counts(converse, stream):
    """Three turns are one record, and the reported counts of tokens are those of the record."""
    usages = []

    async def scenario(session):
        directory = SessionDirectory("tiny")
        key = directory.add("s-1", session)
        async with GatewayServer(directory) as server:
            usages.extend(await converse(server.url("s-1"), key, stream))

    done = Sessions((TURN,)).run(scenario)

    assert Status.COMPLETED is done.result.status
    (record,) = done.records
    starts_and_ends = record.turns()
    assert [start for start, _ in starts_and_ends] == [num_prompt for num_prompt, _ in usages]
    assert [end - start for start, end in starts_and_ends] == [num_sampled for _, num_sampled in usages]
