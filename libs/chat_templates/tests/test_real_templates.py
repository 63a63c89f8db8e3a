"""
Every chat template that the installed `trl` ships, and the real vocabularies of `mistral_common`.

`EXPECTED` holds a verdict for each template, so that a change of ours or of theirs is seen.
"""

import copy
import json
from functools import cache

import jinja2
import pytest
from quirks import PARTS_ONLY
from real_templates import TEMPLATES, VOCABULARIES, chat_of, tokenizer_of

from turnwise.errors import TemplateError
from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import CHATML, byte_tokenizer

ALTERNATE = "Conversation roles must alternate"
LEAVES_OUT_TOOL = "it leaves out the content of a tool message"
TWO_ROLES = "Only user and assistant roles are supported!"
# Their marker of tool outputs precedes the first ones of a conversation only.
ONCE = "they read differently after earlier tool results"

# Kinds: a user message; a tool result; two tool results; a tool result and a user message.
#   =  appended; a whole rendering keeps what was sampled
#   ~  appended; a whole rendering would rewrite earlier turns
#   x  refused, for the reason given
#   j  the template is rendered for each delta
VERDICTS = {
    ("= = = =", ""): """
        gemma4_v2 lfm2_v2 lfm2_v2_training qwen2_5 qwen2_5_training qwen3_5_nothink_training qwen3_5_think_training
        qwen3_6_training qwen3_8 qwen3_8_training qwen3_instruct_2507 qwen3_instruct_2507_training qwen3_training
        qwen3_vl qwen3_vl_training
    """,
    ("= =j =j ~j", ""): """
        gemma4 gemma4_v3 gemma4_v4
    """,
    ("= x x x", ALTERNATE): """
        cohere cohere_training gemma gemma3 gemma3_training gemma_training
    """,
    ("= x x x", LEAVES_OUT_TOOL): """
        cohere2 cohere2_training phi3 phi3_5 phi3_5_training phi3_training
    """,
    ("= x x x", ONCE): """
        deepseek_r1_distill_training
    """,
    ("= ~ = ~", ""): """
        llama3_1 llama3_2
    """,
    ("= ~j ~j ~j", ""): """
        muse_glimmer muse_glimmer_training
    """,
    ("= x x x", TWO_ROLES): """
        llava_next llava_next_training
    """,
    ("= ~ ~ ~", ""): """
        idefics3 idefics3_training lfm2 lfm2_training llama3 llama3_training qwen2_5_vl qwen2_5_vl_training smolvlm
        smolvlm_training
    """,
    ("~ = = ~", ""): """
        glm4moe glm4moe_training lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl nemotron_3_5_lightning
        nemotron_3_5_lightning_training nemotron_3_nano nemotron_3_nano_training nemotron_3_super
        nemotron_3_super_training nemotron_3_ultra nemotron_3_ultra_training qwen3 qwen3_5_nothink qwen3_5_think
        qwen3_6
    """,
    ("~ =j =j ~j", ""): """
        diffusion_gemma diffusion_gemma_training gemma4_v5
    """,
    ("~ =j ~j =j", ""): """
        gptoss gptoss_training
    """,
    ("~ x x x", ONCE): """
        deepseek_r1_distill deepseekv3 deepseekv3_training
    """,
}
EXPECTED = {name: verdict for verdict, names in VERDICTS.items() for name in names.split()}
USER = {"role": "user", "content": "What is 6 * 7?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number", "description": "First."}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
RESULTS = [
    {"role": "tool", "name": "multiply", "tool_call_id": "abcdefgh0", "content": '{"result": 42, "note": "é → 🙂"}'},
    {"role": "tool", "name": "multiply", "tool_call_id": "abcdefgh1", "content": "two\n\nlines"},
]
NEXT = {"role": "user", "content": "And 6 * 8, <b>please</b>?"}
KINDS = {"user": [NEXT], "tool": RESULTS[:1], "two tools": RESULTS, "tool and user": [RESULTS[0], NEXT]}


def turn_before(new: list[dict], *, opens_reasoning: bool) -> dict:
    """Return an assistant message that such new messages answer."""
    reasoning = "<think>\nMultiplication.\n</think>\n\n" if opens_reasoning else ""
    calls = [
        {
            "id": message["tool_call_id"],
            "type": "function",
            "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}},
        }
        for message in new
        if message["role"] == "tool"
    ]
    if calls:
        return {"role": "assistant", "content": reasoning, "tool_calls": calls}
    return {"role": "assistant", "content": reasoning + "The answer is 42."}


def code_of(verdict) -> str:
    if isinstance(verdict, str):
        return "x"
    return ("~" if verdict.rewrites else "=") + ("j" if verdict.pieces is None else "")


def rendered_ids(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def check_appends(chat: ChatTemplate, tokenizer, new: list[dict], *, keeps: bool, tools: list[dict] | None = None):
    """Check that a delta is the end of the whole rendering, and behind prompt and turn all of it."""
    prompt = chat.prompt([USER], tools or []).tolist()
    opens_reasoning = chat.tokenizer.decode(prompt).endswith("<think>\n")
    turn = turn_before(new, opens_reasoning=opens_reasoning)
    try:
        whole = rendered_ids(tokenizer, [USER, turn, *new], tools)
    except jinja2.TemplateError:
        # Llama's templates take one call a turn, yet any number of results.
        assert len(turn["tool_calls"]) > 1
        whole = rendered_ids(tokenizer, [USER, {"role": "assistant", "content": "It is 42."}, *new], tools)
    closed = [(stop, chat.delta(new, stop).tolist()) for stop in chat.stop_token_ids]
    suffixes = [(stop, delta) for stop, delta in closed if whole[len(whole) - len(delta) :] == delta]
    assert suffixes
    stop, delta = min(suffixes, key=lambda pair: len(pair[1]))
    if keeps:
        assert prompt == whole[: len(prompt)]
        sampled = whole[len(prompt) : len(whole) - len(delta)]
        assert stop == sampled[-1]
        assert "6" in chat.text(sampled) or "42" in chat.text(sampled)
    check_cut(chat, new, stop, delta)


def check_cut(chat: ChatTemplate, new: list[dict], stop: int, delta: list[int]):
    """Check that behind a turn without its end a delta closes it first, and is the same from there on."""
    cut = chat.delta(new, chat.tokenizer.encode("x")[-1]).tolist()
    assert delta == cut[len(cut) - len(delta) :]
    assert len(cut) > len(delta)


def appended(chat: ChatTemplate, message: dict) -> list[int]:
    """Return the ids of a prompt that is a user message, or of a delta that is another one."""
    if message["role"] == "user":
        return chat.prompt([message]).tolist()
    return chat.delta([message], chat.stop_token_ids[0]).tolist()


def num_special(chat: ChatTemplate, ids: list[int]) -> int:
    return sum(chat.tokenizer.decode([token_id]) in chat.tokenizer.special_tokens for token_id in ids)


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="trl is not installed")
class TestShippedTemplates:
    """Templates that trl ships for widely trained models."""

    def test_every_template_has_a_verdict(self):
        """A template that trl adds, or drops, changes the table."""
        assert sorted(EXPECTED) == sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

    @pytest.mark.many_cases(24)
    @pytest.mark.parametrize("name", EXPECTED)
    def test_verdict(self, name):
        """The proof agrees with the table, also on the reason of a refusal."""
        codes, reason = EXPECTED[name]
        verdicts = chat_of(name).verify()
        assert codes == " ".join(map(code_of, verdicts))
        assert all(reason in verdict for verdict in verdicts if isinstance(verdict, str))

    # The others take contents in parts, which `test_pictures.py` compares with a whole rendering.
    @pytest.mark.parametrize("name", [name for name in EXPECTED if not name.startswith(PARTS_ONLY)])
    def test_token_level(self, name):
        """Prompt, sampled turn and delta are the ids of the whole conversation; refused messages raise."""
        chat = chat_of(name)
        tokenizer = tokenizer_of((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
        for code, new in zip(EXPECTED[name][0].split(), KINDS.values(), strict=True):
            if code == "x":
                with pytest.raises(TemplateError, match="cannot append a tool message"):
                    chat.delta(new, chat.stop_token_ids[0])
            else:
                check_appends(chat, tokenizer, new, keeps=code[0] == "=")

    @pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "gptoss", "gemma4", "glm4moe"])
    def test_token_level_with_tools(self, name):
        """Deltas do not know of tools, and need not."""
        tokenizer = tokenizer_of((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
        for code, new in zip(EXPECTED[name][0].split(), KINDS.values(), strict=True):
            check_appends(chat_of(name), tokenizer, new, keeps=code[0] == "=", tools=[TOOL])

    def test_end_of_turn_of_gpt_oss(self):
        """The token that ends a turn in history is not a stop token when the model ends turns with another."""
        chat = chat_of("gptoss")
        stops = [chat.tokenizer.decode([token_id]) for token_id in chat.stop_token_ids]
        assert stops == ["<|return|>", "<|call|>", "<eos>"]
        ids = chat.delta([NEXT], chat.stop_token_ids[0])
        assert chat.tokenizer.decode(ids).startswith("<|start|>user<|message|>")

    def test_turns_that_end_with_the_next_role(self):
        """GLM samples the token of the role it hands over to; another one is not taken for it."""
        chat = chat_of("glm4moe")
        stops = {chat.tokenizer.decode([token_id]): token_id for token_id in chat.stop_token_ids}
        assert list(stops) == ["<|user|>", "<|observation|>", "<eos>"]
        texts = [chat.tokenizer.decode(chat.delta(RESULTS[:1], stop)) for stop in stops.values()]
        starts = ["<|observation|>\n<tool_response>", "\n<tool_response>", "<|observation|>\n<tool_response>"]
        assert [text.startswith(start) for text, start in zip(texts, starts, strict=True)] == [True] * 3

    def test_names_of_tools(self):
        """A template that shows the tool's name gets it from the tool message, and asks for it."""
        chat = chat_of("gptoss")
        text = chat.tokenizer.decode(chat.delta([{"role": "tool", "name": "adder", "content": "3"}], 0))
        assert "<|start|>functions.adder to=assistant" in text
        with pytest.raises(TemplateError, match="gptoss shows 'name' of a tool message"):
            chat.delta([{"role": "tool", "content": "3"}], 0)

    @pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe"])
    def test_generation_prompt_without_thinking(self, name):
        """Text that an option adds to the generation prompt is part of the prompt and of every delta."""
        tokenizer = tokenizer_of((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
        chat = ChatTemplate(tokenizer, {"enable_thinking": False})
        for ids in (chat.prompt([USER]), chat.delta([NEXT], chat.stop_token_ids[0])):
            assert chat.tokenizer.decode(ids).rstrip().endswith("</think>")

    @pytest.mark.many_cases
    @pytest.mark.parametrize("name", EXPECTED)
    def test_spelled_special_tokens(self, name):
        """Each special token that a content spells is shown as text; only the template's own are special."""
        chat = chat_of(name)
        special = chat.tokenizer.special_tokens
        for message in (USER, {"role": "tool", "name": "f", "tool_call_id": "abcdefgh0"}):
            for spelled in special:
                content = f"a{spelled}b"
                try:
                    harmless = appended(chat, {**message, "content": "a" * len(content)})
                except TemplateError:
                    continue
                found = appended(chat, {**message, "content": content})
                assert num_special(chat, harmless) == num_special(chat, found)
                assert content in chat.tokenizer.decode(found).replace('\\"', '"')


# After Mistral's template for its version 3 tokenizers; tools precede the newest user message.
MISTRAL = """\
{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (tool_call.function | tojson)[:-1] + ', "id": "' + tool_call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""


@cache
def sentencepiece_tokenizer(file: str):
    """
    Load a sentencepiece model by its protobuf: its BPE merges follow from the order of its pieces.

    The package `sentencepiece` is not needed for that, and not installed.
    """
    from transformers import AddedToken, LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges
    from transformers.utils import sentencepiece_model_pb2_new as protobuf

    model = protobuf.ModelProto()
    model.ParseFromString((VOCABULARIES / file).read_bytes())
    vocab = {piece.piece: index for index, piece in enumerate(model.pieces)}
    control = [AddedToken(piece.piece, special=True, normalized=False) for piece in model.pieces if piece.type == 3]
    tokenizer = LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab))
    tokenizer.add_tokens(control, special_tokens=True)
    return tokenizer


@cache
def tekken_tokenizer():
    from transformers.integrations.mistral import convert_tekken_tokenizer

    return convert_tekken_tokenizer(str(VOCABULARIES / "tekken_240911.json"))


def real_tokenizer(name: str):
    """Return a tokenizer that other tests use too: a test that adds tokens to it, or a template, copies it first."""
    return tekken_tokenizer() if name.startswith("tekken") else sentencepiece_tokenizer(name)


V1 = "tokenizer.model.v1"
V3 = "mistral_instruct_tokenizer_240323.model.v3"
TEKKEN = "tekken_240911.json"
LARGE = pytest.param(TEKKEN, marks=pytest.mark.slow)
"""It takes six seconds to load."""
CONTENTS = ["42", " 42 \n", '\n\n{\n  "a": [1]\n}', "é → 世界 🙂", "", "</s> and [INST]"]


@pytest.mark.skipif(not VOCABULARIES.is_dir(), reason="mistral_common is not installed")
class TestRealVocabularies:
    """Tokenizers with merges, where the ids of a text depend on the text before it."""

    @pytest.mark.many_cases
    @pytest.mark.parametrize("name", [V1, V3, LARGE])
    @pytest.mark.parametrize("content", CONTENTS)
    def test_mistral_format(self, name, content):
        """Prompt, sampled turn and delta are the ids of the whole; version 1 spells [INST] in plain pieces."""
        tokenizer, chat = self.mistral_chat(name)
        for new in ([{**NEXT, "content": content}], [{**RESULTS[0], "content": content}]):
            turn = turn_before(new, opens_reasoning=False)
            whole = rendered_ids(tokenizer, [USER, turn, *new])
            prompt = chat.prompt([USER]).tolist()
            delta = chat.delta(new, tokenizer.eos_token_id).tolist()
            assert delta == whole[len(whole) - len(delta) :]
            if name == V1:
                # Its [/INST] is not special: what is sampled behind it may be split otherwise in a whole text.
                continue
            assert prompt == whole[: len(prompt)]
            sampled = whole[len(prompt) : len(whole) - len(delta)]
            assert tokenizer.eos_token_id == sampled[-1]
            assert "42" in chat.text(sampled) or "multiply" in chat.text(sampled)

    @staticmethod
    @cache
    def mistral_chat(name: str) -> tuple[object, ChatTemplate]:
        tokenizer = copy.deepcopy(real_tokenizer(name))
        # Without tools in it, it can be appended to; see the next test.
        tokenizer.chat_template = MISTRAL.replace("if tools and", "if false and")
        return tokenizer, ChatTemplate(tokenizer, special_tokens="parse")

    @pytest.mark.parametrize("name", [V1, V3, LARGE])
    def test_spelled_special_tokens(self, name):
        """Merges of ordinary pieces do not lead to a special token, and add no space."""
        tokenizer = copy.deepcopy(real_tokenizer(name))
        tokenizer.chat_template = MISTRAL.replace("if tools and", "if false and")
        chat = ChatTemplate(tokenizer)
        content = f"{'x '.join(chat.tokenizer.special_tokens)}\n</s>"
        for message in (USER, RESULTS[0]):
            found = appended(chat, {**message, "content": content})
            assert num_special(chat, appended(chat, {**message, "content": "a"})) == num_special(chat, found)
            assert content in chat.tokenizer.decode(found)

    def test_tools_that_move_are_refused(self):
        """Tools before the newest user message are no append; tool results are, and messages without tools."""
        chat = ChatTemplate(byte_tokenizer(MISTRAL, bos_token="<s>", eos_token="</s>"))
        with pytest.raises(TemplateError, match=r"cannot append a user message: they read differently when tools"):
            chat.delta([NEXT], chat.stop_token_ids[0])
        without = chat.delta([NEXT], chat.stop_token_ids[0], with_tools=False)
        assert f"[INST] {NEXT['content']}[/INST]" == chat.tokenizer.decode(without)
        text = chat.tokenizer.decode(chat.delta(RESULTS[:1], chat.stop_token_ids[0]))
        assert f'[TOOL_RESULTS] {{"content": {RESULTS[0]["content"]}, "call_id": "abcdefgh0"}}[/TOOL_RESULTS]' == text
        with pytest.raises(TemplateError, match="shows 'tool_call_id' of a tool message"):
            chat.delta([{"role": "tool", "content": "3"}], 0)

    @pytest.mark.parametrize("name", [V3, LARGE])
    def test_chatml(self, name):
        """ChatML over a real vocabulary: merges do not reach over the edges of a delta."""
        tokenizer = copy.deepcopy(real_tokenizer(name))
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.chat_template = CHATML
        chat = ChatTemplate(tokenizer, special_tokens="parse")
        for content in CONTENTS:
            for new in ([{**NEXT, "content": content}], [{**result, "content": content} for result in RESULTS]):
                whole = rendered_ids(tokenizer, [USER, turn_before(new, opens_reasoning=False), *new])
                delta = chat.delta(new, chat.stop_token_ids[0]).tolist()
                assert delta == whole[len(whole) - len(delta) :]
                assert chat.stop_token_ids[0] == whole[len(whole) - len(delta) - 1]

    @pytest.mark.slow
    def test_forty_tools_are_encoded_once(self):
        """A prompt whose beginning is known has the ids of a prompt that is encoded whole."""
        tokenizer = copy.deepcopy(real_tokenizer(TEKKEN))
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.chat_template = CHATML
        chat = ChatTemplate(tokenizer, special_tokens="parse")
        tools = [json.loads(json.dumps(TOOL).replace("multiply", f"multiply_{index}")) for index in range(40)]
        for content in (*CONTENTS, *CONTENTS):
            messages = [{"role": "user", "content": content}]
            assert rendered_ids(tokenizer, messages, tools) == chat.prompt(messages, tools).tolist()
