"""Every parser passes the conformance suite of tool parsers."""

import pytest

from turnwise_testing.checks.parser import ARGUMENTS
from turnwise_testing.suites.parser import ToolParserSuite
from turnwise_testing.suites.plugin import PluginSuite


class Formats(ToolParserSuite):
    """The suite with default options; a subclass names the parser and its malformed calls."""

    entry_point = "tool_parsers"
    module = "turnwise_tool_parsers"
    registered = ""
    broken = ()
    quotes_calls = True

    @pytest.fixture
    def resources(self, resources_of):
        """Tools with schemas, which XML formats need."""
        calls = [(f"tool_{i}", arguments) for i, arguments in enumerate(ARGUMENTS)]
        known = [*calls, ("some_tool", {key: value for arguments in ARGUMENTS for key, value in arguments.items()})]
        two = {f"tool_{i}": arguments for i, arguments in enumerate(ARGUMENTS[-2:])}
        return resources_of(*((name, {**arguments, **two.get(name, {})}) for name, arguments in known))

    @pytest.fixture
    def write_call(self, render):
        """Writes a call as the chat template of the model does."""
        return lambda name, arguments: render(self.registered, "", [(name, arguments)])

    @pytest.fixture
    def malformed(self):
        """Texts of calls that cannot be run."""
        return self.broken


class TestLlama3Json(Formats):
    """`llama3_json`."""

    registered = "llama3_json"
    broken = ("<|python_tag|>{", "<|python_tag|>", '<|python_tag|>{"name": "a", "parameters": [1]}', '{"name": "a", x')


class TestLlama4Pythonic(Formats):
    """`llama4_pythonic`."""

    registered = "llama4_pythonic"
    broken = ("<|python_start|>", "<|python_start|>[a(1)]", "[a(x=1", "[a(x=y)]", "<|python_start|>a(x=1)")


class TestQwen3Coder(Formats):
    """`qwen3_coder`."""

    registered = "qwen3_coder"
    quotes_calls = False
    broken = (
        "<tool_call></tool_call>",
        "<tool_call><function=a><parameter=b>1</function></tool_call>",
        "<tool_call><function=a>",
        "<function=",
    )


class TestMistral(Formats):
    """`mistral`."""

    registered = "mistral"
    broken = (
        "[TOOL_CALLS]",
        "[TOOL_CALLS][{]",
        "[TOOL_CALLS]add[ARGS]{",
        "[TOOL_CALLS] [1]",
        "[TOOL_CALLS]add[ARGS][]",
    )


class TestDeepSeekV3(Formats):
    """`deepseek_v3`."""

    registered = "deepseek_v3"
    broken = (
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{}",
        "<｜tool▁call▁begin｜>a<｜tool▁call▁end｜>",
    )


class TestGlm45(Formats):
    """`glm45`."""

    registered = "glm45"
    quotes_calls = False
    broken = (
        "<tool_call></tool_call>",
        "<tool_call>a<arg_key>b</arg_key><arg_value>1</tool_call>",
        "<tool_call>a",
        "<tool_call>a b=1 <c></tool_call>",
    )


class TestKimiK2(Formats):
    """`kimi_k2`."""

    registered = "kimi_k2"
    broken = (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{<|tool_call_end|>",
        "<|tool_call_begin|>functions.a:0<|tool_call_end|>",
        "<|tool_call_begin|>3<|tool_call_argument_begin|>{}<|tool_call_end|>",
    )


class TestGptOss(Formats):
    """`gpt_oss`."""

    registered = "gpt_oss"
    broken = (
        "<|channel|>commentary to=functions.a <|constrain|>json<|message|>{<|call|>",
        "<|channel|>commentary to=functions.a json<|message|>{} x<|call|>",
        " to=functions.a<|channel|>commentary<|message|>",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
    )


class TestGranite(Formats):
    """`granite`."""

    registered = "granite"
    broken = ("<|tool_call|>[", "<tool_call>", '<|tool_call|>[{"name": "a", "x": 1}]', "<function_call> {}")


class TestPhi4(Formats):
    """`phi4`."""

    registered = "phi4"
    broken = (
        "<|tool_call|>[",
        "functools[{]",
        "<|tool_call|>[]<|/tool_call|>",
        'functools[{"name": "", "arguments": {}}]',
    )


class TestAuto(Formats):
    """`auto`, with a chat template that writes the format of Hermes."""

    registered = "auto"
    broken = ("<tool_call>{</tool_call>", "<tool_call></tool_call>", "<tool_call>[1]</tool_call>", "So: <tool_call>{}")

    @pytest.fixture
    def write_call(self, render):
        """Writes a call as Hermes models do."""
        return lambda name, arguments: render("hermes", "", [(name, arguments)])


class TestThinkTags(PluginSuite):
    """The standard suite on the reasoning parser."""

    entry_point = "tool_parsers"
    module = "turnwise_tool_parsers"
    registered = "think_tags"
    hook = "register_reasoning_parsers"
