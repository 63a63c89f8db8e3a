# ruff: noqa: E501 - the templates are easier to read on one line each
"""Templates with rules that a short probe does not reach: real conversations are compared with whole renderings."""

import itertools
from functools import cache

import jinja2
import pytest
from real_templates import shared_tokenizer, with_template
from structlog.testing import capture_logs

from turnwise.errors import TemplateError
from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import SPECIAL_TOKENS, byte_tokenizer
from turnwise_testing.inputs.vocabularies import VOCABULARIES, missing_package

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in ("zip", "add")
]


def template(
    *,
    head="",
    tools="{{ tools | tojson }}",
    user="{{ m.content }}",
    answer="{{ m.content or '' }}",
    arguments="{{ c.function.arguments | tojson }}",
    result="{{ m.content }}",
    before="",
    after="",
    end="<|im_end|>\n",
    prompt="<|im_start|>assistant\n",
    loop="messages",
):
    """Return a ChatML template with some of its parts replaced."""
    return (
        head + "{%- if tools %}<|im_start|>system\n" + tools + "<|im_end|>\n{% endif %}"
        "{%- for m in " + loop + " %}" + before + "{%- if m.role == 'user' %}<|im_start|>user\n" + user + "<|im_end|>\n"
        "{%- elif m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n"
        "{%- elif m.role == 'assistant' %}<|im_start|>assistant\n" + answer + "{% for c in m.tool_calls or [] %}"
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
        + arguments
        + "}</tool_call>{% endfor %}"
        + end
        + ""
        "{%- elif m.role == 'tool' %}<|im_start|>tool\n" + result + "<|im_end|>\n{%- endif %}" + after + "{%- endfor %}"
        "{%- if add_generation_prompt %}" + prompt + "{% endif %}"
    )


def strip(condition):
    return (
        "{% if '</think>' in (m.content or '') and "
        + condition
        + " %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content or '' }}{% endif %}"
    )


LAST_USER = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}{% endif %}{% endfor %}"
HOSTILE = {
    "strips reasoning of earlier turns": template(answer=strip("not loop.last")),
    "reasoning in the last task only": template(head=LAST_USER, answer=strip("loop.index < ns.last")),
    "date with microseconds": template(head="<|im_start|>system\n{{ strftime_now('%H:%M:%S.%f') }}<|im_end|>\n"),
    "numbers turns": template(user="{{ loop.index }}: {{ m.content }}"),
    "numbers modulo 10": template(user="{{ loop.index % 10 }}: {{ m.content }}"),
    "numbers results": template(
        head="{% set ns = namespace(n=0) %}", result="{% set ns.n = ns.n + 1 %}{{ ns.n }}: {{ m.content }}"
    ),
    "note after the sixth message": template(after="{% if loop.index == 6 %}<|im_start|>note\nSix.<|im_end|>\n{% endif %}"),
    "note after the 20th message": template(after="{% if loop.index == 20 %}<|im_start|>note\nTwenty.<|im_end|>\n{% endif %}"),
    "note from the 20th message on": template(user="{{ m.content }}{% if loop.index > 20 %} (late){% endif %}"),
    "cuts results at 2000": template(result="{{ m.content[:2000] }}"),
    "short contents only": template(user="{% if m.content | length < 300 %}{{ m.content }}{% else %}(long){% endif %}"),
    "note after a long answer": template(
        end="<|im_end|>\n{% if (m.content or '') | length > 300 %}<|im_start|>note\nLong.\n{% endif %}"
    ),
    "sorts tools": template(tools="{{ tools | sort(attribute='function.name') | tojson }}"),
    "arguments as text only": template(arguments="{{ c.function.arguments | string | trim }}"),
    "arguments by items": template(arguments="{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}"),
    "refuses consecutive results": template(
        before="{% if m.role == 'tool' and messages[loop.index0 - 1].role == 'tool' %}{{ raise_exception('two') }}{% endif %}"
    ),
    "end of text after each answer": template(end="<|im_end|>\n<|endoftext|>"),
    "end of text after the last answer": template(end="<|im_end|>\n{% if loop.last %}<|endoftext|>{% endif %}"),
    "collapses white space": template(user="{{ m.content.split() | join(' ') }}"),
    "escapes HTML": template(user="{{ m.content | e }}", result="{{ m.content | e }}"),
    "kind of a result": template(result="{% if m.content[:1] == '{' %}json{% else %}text{% endif %}: {{ m.content }}"),
    "user text with tools": template(user="{{ m.content }}{% if tools %} Use tools.{% endif %}"),
    "generation prompt with tools": template(prompt="<|im_start|>assistant\n{% if tools %}Tools: {% endif %}"),
    "generation prompt of the last role": template(
        prompt="<|im_start|>assistant\n{% if messages[-1].role == 'tool' %}Result: {% endif %}"
    ),
    "folds equal results": template(
        result="{% if loop.index0 > 1 and messages[loop.index0 - 1].content == m.content %}same{% else %}{{ m.content }}{% endif %}"
    ),
    "merges system into user": template(
        user="{% if loop.index0 == 1 and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}{{ m.content }}"
    ),
    "mark after the last result": template(
        result="{{ m.content }}{% if loop.last %} (last){% endif %}",
    ),
    "window of four messages": template(loop="messages[-4:]"),
    "system prompt in the newest user message": template(
        head=LAST_USER, user="{% if loop.index == ns.last and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}{{ m.content }}"
    ),
}  # fmt: skip
DIFFERING = {
    "note after the 20th message",
    "note from the 20th message on",
    "cuts results at 2000",
    "short contents only",
    "note after a long answer",
}
"""Templates whose proofs pass and whose deltas are wrong in a long conversation."""
SIZES = (4, 400)
"""Characters of a text."""


def calling(*names):
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": '{"word": "zebra"}'}}
        for index, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "<think>Hm.</think>Calling.", "tool_calls": calls}


def result(content, index=0):
    return {"role": "tool", "tool_call_id": f"call0000{index}", "name": "add", "content": content}


def conversation(num_rounds=5, size=400):
    """Return messages of rounds of a question, a call with a result, two calls with results, and an answer."""
    messages = [{"role": "system", "content": "Be brief."}]
    for number in range(num_rounds):
        messages += [
            {"role": "user", "content": f"Question {number}?  <b>{'why ' * (size // 4 * (number % 2))}</b>"},
            calling("add"),
            result(f"{{{number}}}" + "x" * (size * 6 * (number % 2))),
            calling("add", "zip"),
            result(f"a{number}"),
            result(f"b{number}", 1),
            {
                "role": "assistant",
                "content": f"<think>Fine.</think>Answer {number}." + " more" * (size // 4 * (number % 2)),
            },
        ]
    return [*messages, {"role": "user", "content": "Last?"}]


def blocks_of(messages):
    """Yield the messages before each block of new ones, and the block."""
    start = None
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            if start is not None:
                yield messages[:start], messages[start:index]
            start = index + 1
    if start is not None and start < len(messages):
        yield messages[:start], messages[start:]


def is_exact(chat, tokenizer, messages, tools):
    """Return whether the ids of the whole end with each delta that the template appends; None if it appends none."""
    compared = []
    plain = [
        dict(
            m, tool_calls=[dict(c, function=dict(c["function"], arguments={"word": "zebra"})) for c in m["tool_calls"]]
        )
        if "tool_calls" in m
        else m
        for m in messages
    ]
    for (_before, block), (shown, new) in zip(blocks_of(messages), blocks_of(plain), strict=True):
        try:
            ids = chat.delta(block, chat.stop_token_ids[0], with_tools=bool(tools)).tolist()
            whole = tokenizer.apply_chat_template(
                [*shown, *new], tools=tools or None, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, jinja2.TemplateError):  # the template refuses one of both
            continue
        whole_ids = chat.tokenizer.encode(whole)
        compared.append(any(whole_ids[-len(ids) - 1 :] == [stop, *ids] for stop in chat.stop_token_ids))
    return all(compared) if compared else None


def check_that_a_difference_is_found(tokenizer, name, size, tools):
    """Check a template; return whether its deltas are exact, and None if none of them can be compared."""
    try:
        chat = ChatTemplate(tokenizer, name=name, check_every=1)
    except TemplateError:
        return None  # refused as a whole
    messages = conversation(size=size)
    exact = is_exact(chat, tokenizer, messages, tools)

    with capture_logs() as logs:
        found = [chat.check_conversation(0, messages, tools) for _ in range(2)]

    compared = 0 if exact is None else 1
    expected = {"template/compared_conversations": 1.0, "template/differing_conversations": float(not exact)}
    assert found == ([expected] * 2 if compared else [{}, {}])
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert len(warnings) == (1 if exact is False else 0)
    assert all(line["template"] == name and "instead of" in line["at"] for line in warnings)
    assert exact is not False or name in DIFFERING
    assert size == 4 or exact is not True or name not in DIFFERING
    return exact


@pytest.mark.many_cases
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("size", SIZES, ids=["short", "long"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_difference_is_found(name, size, tools):
    """A conversation is reported if, and only if, one of its deltas is not what the template renders."""
    check_that_a_difference_is_found(byte_tokenizer(HOSTILE[name]), name, size, tools)


@cache
def outcome_with_bytes(name, *, with_tools):
    return check_that_a_difference_is_found(byte_tokenizer(HOSTILE[name]), name, SIZES[1], TOOLS if with_tools else [])


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_difference_is_found_with_a_real_vocabulary(vocabulary):
    """The same templates are exact, found or refused when texts have merges."""
    if reason := missing_package(vocabulary):
        pytest.skip(f"{vocabulary} {reason}")
    shared = shared_tokenizer(vocabulary, SPECIAL_TOKENS, "<|im_end|>")

    for name, with_tools in itertools.product(HOSTILE, (False, True)):
        tokenizer = with_template(shared, HOSTILE[name])
        found = check_that_a_difference_is_found(tokenizer, name, SIZES[1], TOOLS if with_tools else [])
        assert found == outcome_with_bytes(name, with_tools=with_tools), name


def test_one_conversation_in_some_is_compared():
    """The option says how many; zero compares none."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    compared = {}
    for every in (0, 1, 3):
        chat = ChatTemplate(byte_tokenizer(), check_every=every)
        compared[every] = [number for number in range(7) if chat.check_conversation(number, messages, [])]

    assert compared == {0: [], 1: [0, 1, 2, 3, 4, 5, 6], 3: [0, 3, 6]}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "assistant"}, {"content": "x"}],
        [{"role": "assistant", "content": 3, "tool_calls": 4}, {"role": "user", "content": [5]}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [{}]},
            {"role": "tool"},
        ],
    ],
    ids=["none", "prompt", "answer", "no keys", "odd values", "odd call"],
)
def test_other_messages_are_not_compared(messages):
    """An agent may note messages of any form."""
    found = ChatTemplate(byte_tokenizer(), check_every=1).check_conversation(0, messages, [])

    assert found.get("template/differing_conversations", 0.0) == 0.0
