"""
A renderer of turns for each format, written from the rules of the models' chat templates.

`TURNS` are Jinja templates of an assistant's turn: they take `content` and `calls`, as chat templates do, and share no
code with the parsers.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import yaml

from turnwise import Registry, Resources
from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_tool_formats.config import ParserConfig
from turnwise_tool_formats.hermes import Hermes
from turnwise_tool_formats.parser import FormatParser
from turnwise_tool_parsers import register_tool_parsers

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one

CHAT = ChatTemplate(byte_tokenizer())

_HERMES = (
    "{{ content }}{% for call in calls %}<tool_call>\n"
    '{"name": {{ call.name | tojson }}, "arguments": {{ call.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
TURNS = {
    "hermes": _HERMES,
    "llama3_json": (
        "{{ content }}<|python_tag|>{% for call in calls %}"
        '{"name": {{ call.name | tojson }}, "parameters": {{ call.arguments | tojson }}}'
        "{% if not loop.last %}; {% endif %}{% endfor %}"
    ),
    "llama4_pythonic": (
        "{{ content }}<|python_start|>[{% for call in calls %}{{ call.name }}("
        "{% for key, value in call.arguments.items() %}{{ key }}={{ value | python }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]"
        "<|python_end|>"
    ),
    "qwen3_coder": (
        "{{ content }}{% for call in calls %}\n<tool_call>\n<function={{ call.name }}>\n"
        "{% for key, value in call.arguments.items() %}<parameter={{ key }}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}"
    ),
    "mistral": (
        "{{ content }}[TOOL_CALLS] [{% for call in calls %}"
        '{"name": {{ call.name | tojson }}, "arguments": {{ call.arguments | tojson }}, "id": "abcdefghi"}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]"
    ),
    "mistral_v13": (
        "{{ content }}{% for call in calls %}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}{% endfor %}"
    ),
    "mistral_v11": (
        "{{ content }}{% for call in calls %}[TOOL_CALLS]{{ call.name }}[CALL_ID]abcdefghi[ARGS]"
        "{{ call.arguments | tojson }}{% endfor %}"
    ),
    "deepseek_v3": (
        "{{ content }}<｜tool▁calls▁begin｜>{% for call in calls %}"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.name }}\n```json\n{{ call.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>{% if not loop.last %}\n{% endif %}{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "{{ content }}<｜tool▁calls▁begin｜>{% for call in calls %}"
        "<｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>{{ call.arguments | tojson }}<｜tool▁call▁end｜>"
        "{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "glm45": (
        "{{ content }}{% for call in calls %}\n<tool_call>{{ call.name }}\n"
        "{% for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}"
        "</tool_call>{% endfor %}"
    ),
    "glm47": (
        "{{ content }}{% for call in calls %}<tool_call>{{ call.name }}"
        "{% for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key>"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
    ),
    "kimi_k2": (
        "{{ content }}<|tool_calls_section_begin|>{% for call in calls %}"
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ call.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    ),
    "gpt_oss": (
        "{{ content }}{% for call in calls %}<|start|>assistant<|channel|>commentary to=functions.{{ call.name }} "
        "<|constrain|>json<|message|>{{ call.arguments | tojson }}<|call|>{% endfor %}"
    ),
    "gpt_oss_role": (
        "{{ content }}{% for call in calls %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary "
        "json<|message|>{{ call.arguments | tojson }}<|call|>{% endfor %}"
    ),
    "granite": (
        "{{ content }}<|tool_call|>[{% for call in calls %}"
        '{"name": {{ call.name | tojson }}, "arguments": {{ call.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]"
    ),
    "granite4": _HERMES,
    "phi4": (
        "{{ content }}<|tool_call|>[{% for call in calls %}"
        '{"name": {{ call.name | tojson }}, "arguments": {{ call.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]<|/tool_call|>"
    ),
    "phi4_functools": (
        "{{ content }}functools[{% for call in calls %}"
        '{"name": {{ call.name | tojson }}, "arguments": {{ call.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]"
    ),
}
PARSER_OF = {
    "mistral_v11": "mistral",
    "mistral_v13": "mistral",
    "deepseek_v31": "deepseek_v3",
    "glm47": "glm45",
    "gpt_oss_role": "gpt_oss",
    "granite4": "granite",
    "phi4_functools": "phi4",
}
_JINJA = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
_JINJA.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
_JINJA.filters["python"] = repr
_TEMPLATES = {name: _JINJA.from_string(text) for name, text in TURNS.items()}


def schema_of(value):
    """Return a JSON schema that allows a value, and texts only if it is one."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return {"type": "null" if value is None else kinds[type(value)]}


def tool_of(name, arguments):
    """Return a tool with the schema of a call's arguments."""
    properties = {key: schema_of(value) for key, value in arguments.items()}
    function = {"name": name, "description": "", "parameters": {"type": "object", "properties": properties}}
    return SimpleNamespace(schema={"type": "function", "function": function})


@pytest.fixture(scope="session")
def chat():
    """A chat template over bytes."""
    return CHAT


@pytest.fixture(scope="session", params=sorted(TURNS))
def turn(request):
    """The name of each renderer."""
    return request.param


@pytest.fixture(scope="session")
def parser_for():
    """A function that builds the parser of a renderer or of a format, from resources and options."""

    def build(turn, resources=None, **options):
        if turn == "hermes":  # another package registers it, and `auto` finds it
            return FormatParser(Hermes(), ParserConfig(**options), resources or Resources(chat=CHAT))
        registry = Registry("tool parser")
        register_tool_parsers(registry)
        entry = registry.get(PARSER_OF.get(turn, turn))
        return entry.factory(entry.config(**options), resources or Resources(chat=CHAT))

    return build


@pytest.fixture(scope="session")
def render():
    """A function that writes a turn, from the name of a renderer, a content and pairs of name and arguments."""

    def write(turn, content, calls):
        named = [
            SimpleNamespace(name=name, arguments=arguments, id=f"functions.{name}:{index}")
            for index, (name, arguments) in enumerate(calls)
        ]
        return _TEMPLATES[turn].render(content=content, calls=named)

    return write


@pytest.fixture(scope="session")
def resources_of():
    """A function that returns the resources of a run with tools for calls, given as pairs of name and arguments."""
    return lambda *calls: Resources(chat=CHAT, tools={name: tool_of(name, arguments) for name, arguments in calls})


def load_cases():
    """Return the hand-written turns, and the tools that they call: schemas of arguments by name."""
    found = yaml.safe_load(Path(__file__).with_name("hand_written.yaml").read_text(encoding="utf-8"))
    return found["cases"], found["tools"]


_CASES, _TOOLS = load_cases()


@pytest.fixture(params=_CASES, ids=[f"{case['format']}-{index}" for index, case in enumerate(_CASES)])
def case(request):
    """Each hand-written turn."""
    return request.param


@pytest.fixture(scope="session")
def hand_written_tools():
    """The OpenAI schemas of the tools that the hand-written turns call, by name."""
    parameters = {name: {"type": "object", "properties": properties} for name, properties in _TOOLS.items()}
    functions = {name: {"name": name, "description": "", "parameters": each} for name, each in parameters.items()}
    return {name: {"type": "function", "function": function} for name, function in functions.items()}


@pytest.fixture(scope="session")
def turn_templates():
    """The Jinja source of each renderer."""
    return TURNS


@pytest.fixture(scope="session")
def parser_names():
    """The parser that `auto` chooses for a renderer whose name is not that of its parser."""
    return PARSER_OF
