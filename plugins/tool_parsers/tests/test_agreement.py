"""
The parsers of vLLM and SGLang read the hand-written turns alike; the table says where they do not, and why.

A turn with a malformed call agrees when the engine returns no call either, and an entry under `differs` must be true.
"""

import json
from importlib.util import find_spec

import pytest

from turnwise_testing.tokenizers import TAGS, byte_tokenizer

VLLM_NAMES = {"phi4": "phi4_mini_json"}
SGLANG_NAMES = {
    "llama3_json": "llama3",
    "llama4_pythonic": "pythonic",
    "deepseek_v3": "deepseekv3",
    "gpt_oss": "gpt-oss",
}
TAGS_OF_VLLM = (
    "[TOOL_CALLS]", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<|tool_call|>",
)  # fmt: skip
"""Tags that parsers of vLLM look up in the vocabulary."""


def check_agreement(case, engine, found):
    """Compare names and arguments, or require a difference where the table has its reason."""
    expected = [tuple(call) for call in case["calls"]]
    if engine in case.get("differs", {}):
        assert expected != found, "the engine agrees by now: remove the reason from the table"
    else:
        assert expected == found


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed in this environment")
@pytest.mark.filterwarnings("ignore")
def test_vllm_agrees(case, hand_written_tools):
    """Names and arguments are equal."""
    if case["format"] == "gpt_oss":
        pytest.skip("vLLM reads gpt-oss by token ids of a vocabulary that has to be downloaded")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    name = case.get("engine_parser", {}).get("vllm", VLLM_NAMES.get(case["format"], case["format"]))
    tools = list(hand_written_tools.values())
    messages = [{"role": "user", "content": "?"}]
    request = ChatCompletionRequest(model="m", messages=messages, tools=tools, tool_choice="auto")
    # Mistral's tokenizers from v11 on have [ARGS], and vLLM asks them which form of calls the model has.
    arguments = ("[ARGS]",) if "[ARGS]" in case["text"] else ()
    tokenizer = byte_tokenizer(tags=(*TAGS, *TAGS_OF_VLLM, *arguments))

    parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    calls = parser.extract_tool_calls(case["text"], request).tool_calls

    check_agreement(case, "vllm", [(call.function.name, _decoded(call.function.arguments)) for call in calls])


@pytest.mark.sglang
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed in this environment")
@pytest.mark.filterwarnings("ignore")
def test_sglang_agrees(case, hand_written_tools):
    """Names and arguments are equal."""
    from turnwise_sglang_engine import stub_packages

    stub_packages.install()  # a CPU lacks packages that SGLang imports
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    name = case.get("engine_parser", {}).get("sglang", SGLANG_NAMES.get(case["format"], case["format"]))
    if name not in FunctionCallParser.ToolCallParserEnum:
        pytest.skip(f"SGLang has no parser {name!r}")
    tools = [Tool(**schema) for schema in hand_written_tools.values()]

    calls = FunctionCallParser(tools, name).parse_non_stream(case["text"])[1]

    check_agreement(case, "sglang", [(call.name, _decoded(call.parameters)) for call in calls])


def _decoded(arguments):
    """Return the arguments of a call, or their text when it is no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
