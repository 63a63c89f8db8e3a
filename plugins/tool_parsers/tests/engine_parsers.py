"""The tool parsers of vLLM and SGLang, which read the text of a turn at once or token by token."""

import json
from importlib.util import find_spec

from turnwise_testing.inputs.tokenizers import TAGS, byte_tokenizer

VLLM_NAMES = {"phi4": "phi4_mini_json", "phi4_functools": "phi4_mini_json"}
SGLANG_NAMES = {
    "llama3_json": "llama3",
    "llama4_pythonic": "pythonic",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "gpt_oss": "gpt-oss",
    "gpt_oss_role": "gpt-oss",
    "granite4": "hermes",
}
_OF_SAME_NAME = ("mistral_v11", "mistral_v13")
_TAGS_OF_VLLM = (
    "[TOOL_CALLS]", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<|tool_call|>",
)  # fmt: skip
"""Tags that parsers of vLLM look up in the vocabulary."""
_TOKENIZERS = {
    # Mistral's tokenizers from v11 on have [ARGS], and vLLM asks them which form of calls the model has.
    has_args: byte_tokenizer(tags=(*TAGS, *_TAGS_OF_VLLM, *(("[ARGS]",) if has_args else ())))
    for has_args in (False, True)
}


def has_engine(name):
    """Return whether an engine is installed in this environment."""
    return find_spec(name) is not None


class VllmParser:
    """A parser of vLLM for a turn with a text, with the OpenAI schemas of its tools."""

    def __init__(self, name, text, tools):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        messages = [{"role": "user", "content": "?"}]
        self.text = text
        self.tokenizer = _TOKENIZERS["[ARGS]" in text]
        self.request = ChatCompletionRequest(model="m", messages=messages, tools=tools, tool_choice="auto")
        name = VLLM_NAMES.get(name, "mistral" if name in _OF_SAME_NAME else name)
        self.parser = ToolParserManager.get_tool_parser(name)(self.tokenizer, self.request.tools)

    def read(self):
        """Return names and arguments of the calls of a whole turn."""
        calls = self.parser.extract_tool_calls(self.text, self.request).tool_calls
        return [(call.function.name, decode(call.function.arguments)) for call in calls]

    def read_stream(self):
        """Return names and arguments of the calls of a turn that comes token by token."""
        parts, before, ids_before = [], "", []
        for text, ids in prefixes(self.tokenizer, self.text):
            new_text, new_ids = text[len(before) :], ids[len(ids_before) :]
            delta = self.parser.extract_tool_calls_streaming(
                before, text, new_text, ids_before, ids, new_ids, self.request
            )
            calls = (delta.tool_calls if delta else None) or []
            parts += [(call.index, call.function.name, call.function.arguments) for call in calls]
            before, ids_before = text, ids
        return join(parts)


class SglangParser:
    """A parser of SGLang, as `VllmParser`; a `LookupError` if SGLang has none of this name."""

    def __init__(self, name, text, tools):
        from turnwise_sglang_engine import stub_packages

        stub_packages.install()  # a CPU lacks packages that SGLang imports
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        self.text = text
        name = SGLANG_NAMES.get(name, "mistral" if name in _OF_SAME_NAME else name)
        if name not in FunctionCallParser.ToolCallParserEnum:
            raise LookupError(name)
        self.parser = FunctionCallParser([Tool(**schema) for schema in tools], name)

    def read(self):
        """Return names and arguments of the calls of a whole turn."""
        return [(call.name, decode(call.parameters)) for call in self.parser.parse_non_stream(self.text)[1]]

    def read_stream(self):
        """Return names and arguments of the calls of a turn that comes token by token."""
        parts, before = [], ""
        for text, _ids in prefixes(_TOKENIZERS[False], self.text):
            calls = self.parser.parse_stream_chunk(text[len(before) :])[1]
            parts += [(call.tool_index, call.name, call.parameters) for call in calls]
            before = text
        return join(parts)


def prefixes(tokenizer, text):
    """Yield text and ids after each token that ends a character."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    for stop in range(1, len(ids) + 1):
        read = tokenizer.decode(ids[:stop])
        if not read.endswith("\ufffd"):
            yield read, ids[:stop]


def join(parts):
    """Return the calls whose parts came one after another: index, and more of the name and of the arguments."""
    calls = {}
    for index, name, arguments in parts:
        call = calls.setdefault(index, ["", ""])
        call[0] += name or ""
        call[1] += arguments or ""
    return [(name, decode(arguments)) for _index, (name, arguments) in sorted(calls.items())]


def decode(arguments):
    """Return the arguments of a call, or their text when it is no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
