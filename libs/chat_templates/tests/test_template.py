"""Chat templates that only append: prompts, deltas, refusals, and loading from a directory."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ConfigError, TemplateError
from turnwise_chat_templates.probe import TURN_MARK
from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import CHATML, SPECIAL_TOKENS, TAGS, byte_tokenizer

TOKENIZER = byte_tokenizer()
# Whole renderings, with which it is compared, parse the special tokens that contents spell.
CHAT = ChatTemplate(TOKENIZER, special_tokens="parse")
IM_END = 258
USER = {"role": "user", "content": "What is 6 * 7?"}
RESULT = {"role": "tool", "content": "42"}
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "abcdefgh0", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6}'}}

# One line a role, content verbatim: what the variants below start from.
PLAIN = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + ':' + message.content + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)


def chat_of(template: str, **options) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(template, bos_token="<s>"), options)


def plain_with(before: str = "", content: str = "message.content") -> str:
    return before + PLAIN.replace("message.content", content)


def delta_text(chat: ChatTemplate, messages: list[dict], last_token_id: int = IM_END) -> str:
    return chat.tokenizer.decode(chat.delta(messages, last_token_id))


def whole_ids(messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    text = TOKENIZER.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return TOKENIZER.encode(text)


CONTENTS = st.text() | st.lists(
    st.sampled_from([" ", "\n", "x", "é", "🙂", *SPECIAL_TOKENS, *TAGS, TURN_MARK, "tw7new0x", '{"a": 1}'])
).map("".join)
NEW_MESSAGES = st.lists(CONTENTS.map(lambda text: {"role": "tool", "content": text}), min_size=1, max_size=3).flatmap(
    lambda results: st.sampled_from([results, [*results, USER], [{**results[0], "role": "user"}], [USER, USER]])
)


class TestPrompt:
    """Prompts up to the start of the model's turn."""

    @pytest.mark.parametrize("tools", [[], [TOOL]])
    def test_is_the_template_of_transformers(self, tools):
        """The ids equal the result of `apply_chat_template`."""
        messages = [{"role": "system", "content": "Be brief."}, USER]
        ids = CHAT.prompt(messages, tools)
        assert whole_ids(messages, tools) == ids.tolist()
        assert np.int32 == ids.dtype

    def test_content_forms(self):
        """Text parts are joined, None is empty."""
        parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "6 * 7?"}]
        assert CHAT.prompt([USER]).tolist() == CHAT.prompt([{"role": "user", "content": parts}]).tolist()
        assert whole_ids([{"role": "user", "content": ""}]) == CHAT.prompt([{"role": "user", "content": None}]).tolist()

    def test_calls_of_earlier_turns(self):
        """Arguments that are JSON reach the template as an object; keys that hold None do not reach it."""
        turn = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
        text = CHAT.tokenizer.decode(CHAT.prompt([USER, turn, RESULT]))
        assert '<|im_start|>assistant\n<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>' in text

    @pytest.mark.parametrize("arguments", ["not json", "[1]", {"a": 6}, '{"a": 8E935566767}', '{"a": NaN}'])
    def test_arguments_of_any_form(self, arguments):
        """Arguments that are no JSON object, or have a number that is not finite, stay unchanged."""
        call = {**CALL, "function": {"name": "f", "arguments": arguments}}
        text = CHAT.tokenizer.decode(CHAT.prompt([USER, {"role": "assistant", "tool_calls": [call]}]))
        assert f'"arguments": {json.dumps(arguments)}}}' in text

    def test_templates_that_join_arguments_to_text(self):
        """A template that fails on the common form of calls gets the others."""
        call = (
            "'<|im_end|>' + (message.content + message.tool_calls[0].function.arguments if message.tool_calls else '')"
        )
        chat = chat_of(PLAIN.replace("'<|im_end|>'", call))
        turn = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"arguments": {"a": 6}}}]}
        assert '<|im_end|>{"a": 6}' in chat.tokenizer.decode(chat.prompt([USER, turn]))
        with pytest.raises(TemplateError, match="has no attribute 'function'"):
            chat.prompt([USER, {"role": "assistant", "tool_calls": [{"id": "flat"}]}])

    def test_form_of_the_messages(self):
        """`shown_messages` returns what the template gets: here it shows no role `developer`, and no text of JSON."""
        function = {"name": "multiply", "arguments": '{"a": 6}'}
        turn = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]}
        parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief <|im_end|>."}]

        shown = CHAT.shown_messages([{"role": "developer", "content": parts}, USER, turn, RESULT])

        call = {**CALL, "function": {"name": "multiply", "arguments": {"a": 6}}}
        system = {"role": "system", "content": "Be brief <|im_end|>."}
        assert shown == [system, USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT]
        with pytest.raises(TemplateError, match="at least one message"):
            CHAT.shown_messages([])

    def test_reason_that_no_form_can_help(self):
        """Another role would show the message; the error names the tools, which stay hidden then too."""
        chat = chat_of(PLAIN.replace("messages %}", "messages if message.role != 'developer' %}"))
        developer = {"role": "developer", "content": "Be brief."}
        assert "Be brief." in chat.tokenizer.decode(chat.prompt([developer, USER]))
        with pytest.raises(TemplateError, match="does not fit the prompt: tools are not shown"):
            chat.prompt([developer, USER], [TOOL])

    @pytest.mark.parametrize(
        ("messages", "text"),
        [
            ([], "at least one message"),
            ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "parts of type 'text' only, not 'image'"),
            ([{"role": "user", "content": ["x"]}], "parts of type 'text' only, not 'str'"),
            ([{"role": "user", "content": 3}], "must be text, not int"),
            ([{"role": "user", "content": b"x"}], "must be text, not bytes"),
        ],
    )
    def test_refuses(self, messages, text):
        """The error names a content that is no text."""
        with pytest.raises(TemplateError, match=text):
            CHAT.prompt(messages)


class TestDelta:
    """Deltas of new messages."""

    def test_worked_example(self):
        """The separator behind the end-of-turn token, the messages, and the next generation prompt."""
        start, end = "\n<|im_start|>user", "<|im_end|>\n<|im_start|>assistant\n"
        result = "\n<tool_response>\n42\n</tool_response>"
        assert f"{start}\nhi{end}" == delta_text(CHAT, [{"role": "user", "content": "hi"}])
        assert f"{start}{result}{end}" == delta_text(CHAT, [RESULT])
        assert f"{start}{result}{result}{end}" == delta_text(CHAT, [RESULT, RESULT])

    def test_cut_turn_is_closed_first(self):
        """Behind any id that ends no turn the end-of-turn token comes first; behind any stop token it does not."""
        chat = ChatTemplate(TOKENIZER, stop_token_ids=[256])
        assert "<|im_end|>" + delta_text(chat, [RESULT]) == delta_text(chat, [RESULT], ord("x"))
        assert delta_text(chat, [RESULT]) == delta_text(chat, [RESULT], 256)
        assert delta_text(chat, [RESULT]) == delta_text(chat, [RESULT], np.int32(IM_END))

    def test_closing_of_several_tokens(self):
        """A turn that ended within its closing is closed from there on."""
        template = PLAIN.replace(
            "'<|im_end|>'", "('<|endoftext|>' if message.role == 'assistant' else '') + '<|im_end|>'"
        )
        chat = ChatTemplate(byte_tokenizer(template), stop_token_ids=[256])
        texts = [delta_text(chat, [USER], last) for last in (ord("x"), 256, IM_END)]
        assert [text[:28] for text in texts[:2]] == ["<|endoftext|><|im_end|><|im_", "<|im_end|><|im_start|>user:W"]
        assert texts[2].startswith("<|im_start|>user:What")

    @given(CONTENTS, CONTENTS, NEW_MESSAGES)
    def test_agrees_with_the_whole(self, question, turn, new):
        """Prompt, sampled turn and delta are the ids of the whole conversation, whatever the contents."""
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": turn}]
        record = [*CHAT.prompt(messages[:1]), *TOKENIZER.encode(turn), IM_END]
        assert whole_ids([*messages, *new]) == [*record, *CHAT.delta(new, record[-1])]

    @given(st.lists(st.tuples(st.lists(st.integers(0, 255)), st.booleans(), NEW_MESSAGES), max_size=4))
    def test_record_only_grows(self, rounds):
        """Sampled ids stay unchanged, and every delta ends where the model continues."""
        record = CHAT.prompt([USER], [TOOL]).tolist()
        for sampled, cut, new in rounds:
            longer = [*record, *sampled, *([] if cut else [IM_END])]
            delta = CHAT.delta(new, longer[-1]).tolist()
            assert longer[: len(record)] == record
            assert delta[-len(b"assistant\n") - 1 :] == [257, *b"assistant\n"]
            assert (longer[-1] == IM_END) != (delta[0] == IM_END)
            record = longer + delta

    @pytest.mark.parametrize(
        ("before", "shown"),
        [
            ("{{ bos_token }}", "<s>"),
            (
                "{% if messages[0].role != 'system' %}{{ '<|im_start|>system:Be good.<|im_end|>' }}{% endif %}",
                "Be good",
            ),
            ("{{ '<|im_start|>system:' + strftime_now('%Y') + '<|im_end|>' }}", "system:2"),
        ],
    )
    def test_what_stands_before_is_no_part_of_it(self, before, shown):
        """A BOS token, a default system prompt or a date is in the prompt and in no delta."""
        chat = chat_of(plain_with(before))
        assert shown in chat.tokenizer.decode(chat.prompt([USER]))
        assert delta_text(chat, [USER]) == "<|im_start|>user:What is 6 * 7?<|im_end|><|im_start|>assistant:"

    @pytest.mark.parametrize("change", ["| trim", "| tojson", "| replace('q', 'y')", "[:20]", "or 'nothing'"])
    def test_content_that_a_template_changes(self, change):
        """Whether put together or rendered, the text is the template's."""
        changed = f"(message.content if message.role == 'assistant' else (message.content {change}))"
        chat = chat_of(plain_with(content=changed))
        before = [USER, {"role": "assistant", "content": "42"}]
        for content in (' Q "q"\n', "", "a long question about 6 * 7"):
            new = [{"role": "user", "content": content}, {"role": "tool", "content": f"\t{content}"}]
            whole = chat.tokenizer.decode(chat.prompt([*before, *new]))
            assert whole.split("assistant:42<|im_end|>")[1] == delta_text(chat, new)

    def test_special_treatment_of_a_content(self):
        """A template that searches the content for its own text is rendered for each delta."""
        chat = chat_of(plain_with(content="message.content + ('' if message.content.endswith('/no') else '/no')"))
        assert [None] * 4 == [verdict.pieces for verdict in chat.verify()]
        assert "user:x/no<|im_end|>" in delta_text(chat, [{"role": "user", "content": "x"}])
        assert "user:x/no<|im_end|>" in delta_text(chat, [{"role": "user", "content": "x/no"}])

    def test_content_that_is_shown_twice(self):
        """Text that no concatenation gives is rendered, even if it quotes the marks of the probe."""
        chat = chat_of(plain_with(content="message.content + message.content"))
        for content in ("hi", TURN_MARK, "tw7new0x"):
            assert f"user:{content}{content}<|im_end|>" in delta_text(chat, [{"role": "user", "content": content}])

    def test_content_that_is_refused(self):
        """A template may refuse a content that it knows."""
        chat = chat_of(plain_with("{% if messages[-1].content == 'bad' %}{{ raise_exception('Bad.') }}{% endif %}"))
        assert "user:good<|im_end|>" in delta_text(chat, [{"role": "user", "content": "good"}])
        with pytest.raises(TemplateError, match=r"the chat template fails: Bad\."):
            chat.delta([{"role": "user", "content": "bad"}], IM_END)

    def test_keys_beside_the_content(self):
        """A message with keys that a template may read is rendered."""
        chat = chat_of(plain_with(content="message.content + (message.mood or '')"))
        assert "user:hi!<|im_end|>" in delta_text(chat, [{"role": "user", "content": "hi", "mood": "!"}])

    def test_roles_of_any_kind(self):
        """A kind of message that was not verified at first is verified when it comes."""
        assert "<|im_start|>system\nhi<|im_end|>" in delta_text(CHAT, [{"role": "system", "content": "hi"}])
        with pytest.raises(TemplateError, match="cannot append a critic message: it leaves out the content"):
            CHAT.delta([{"role": "critic", "content": "hi"}], IM_END)

    @pytest.mark.parametrize(
        ("messages", "text"),
        [
            ([], "at least one"),
            ([{"role": "assistant", "content": "hi"}], "the model's are sampled"),
            ([{"content": "hi"}], "a message has no role"),
            ([{"role": "tool", "content": [{"type": "image"}]}], "not 'image'"),
        ],
    )
    def test_refuses(self, messages, text):
        """Messages that cannot be appended."""
        with pytest.raises(TemplateError, match=text):
            CHAT.delta(messages, IM_END)


class TestProof:
    """Templates that cannot be used by appending, or only for some kinds of messages."""

    NO_TOOLS = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('No tools here.') }}{% endif %}{% endfor %}"
    )

    def test_roles_are_judged_separately(self):
        """A template without tools serves user messages, and only tool messages raise."""
        chat = chat_of(plain_with(self.NO_TOOLS))
        assert [isinstance(verdict, str) for verdict in chat.verify()] == [False, True, True, True]
        assert delta_text(chat, [USER]).startswith("<|im_start|>user:")
        with pytest.raises(TemplateError, match="chat template cannot append a tool message: it fails: No tools here"):
            chat.delta([RESULT], IM_END)

    def test_tools_alone(self):
        """A template may take tool results and no second user message."""
        several = "{% if messages | selectattr('role', 'equalto', 'user') | list | length > 1 %}"
        chat = chat_of(plain_with(several + "{{ raise_exception('One, please.') }}{% endif %}"))
        assert [isinstance(verdict, str) for verdict in chat.verify()] == [True, False, False, True]
        assert delta_text(chat, [RESULT]) == "<|im_start|>tool:42<|im_end|><|im_start|>assistant:"

    def test_tools_in_every_message(self):
        """A template that shows tools again in new messages appends only to prompts without tools."""
        chat = chat_of(plain_with(content="message.content + (tools | tojson if tools else '')"))
        with pytest.raises(TemplateError, match=r"cannot append a user message: .*differently when tools are given"):
            chat.delta([{"role": "user", "content": "more"}], IM_END)
        found = chat.delta([{"role": "user", "content": "more"}], IM_END, with_tools=False)
        assert "<|im_start|>user:more<|im_end|><|im_start|>assistant:" == chat.tokenizer.decode(found)

    @pytest.mark.parametrize(
        ("template", "text"),
        [
            (PLAIN.replace("<|im_", "<im_"), "no special token separates them from the turn of the model"),
            (plain_with(content="(message.content if message.role == 'user' and loop.first else '')"), "leaves out"),
            (plain_with("{{ messages[-1].content }}", "(message.content if not loop.last else '')"), "before the turn"),
            (plain_with(content="loop.index | string + message.content"), "differently after a system message"),
            (plain_with(content="message.content | upper"), "leaves out"),
            (plain_with(content="(message.content if message.role != 'assistant' else '')"), "leaves out the turn"),
        ],
    )
    def test_unusable(self, template, text):
        """The error quotes the template's text at the difference."""
        with pytest.raises(TemplateError, match=f"cannot append a user message: .*{text}"):
            chat_of(template)

    def test_end_of_turn_that_depends_on_what_follows(self):
        """An end-of-turn token that some contents take away cannot be appended to."""
        end = "('<|im_end|>' if messages[-1].content or not add_generation_prompt else '')"
        with pytest.raises(TemplateError, match="the template ends a turn differently before these messages"):
            chat_of(PLAIN.replace("'<|im_end|>'", end))

    def test_ids_that_depend_on_their_context(self):
        """A tokenizer that loses its end-of-turn token at the start of a text is found out by its ids."""
        from tokenizers import Regex, normalizers
        from transformers import AddedToken

        tokenizer = byte_tokenizer(PLAIN, ["<|im_start|>"], eos_token=None)
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(r"^<\|im_end\|>"), "")
        tokenizer.add_special_tokens({"eos_token": AddedToken("<|im_end|>", special=True, normalized=True)})
        with pytest.raises(TemplateError, match=r"their ids depend on the text before them: '<\|im_start\|>user:plain"):
            ChatTemplate(tokenizer)

    @pytest.mark.parametrize(
        ("template", "rewrites"),
        [
            (PLAIN, ""),
            (plain_with(content="message.content.split('</think>')[-1]"), "drops the reasoning of an earlier turn"),
            (PLAIN.replace("'<|im_start|>assistant:'", "'<|im_start|>assistant:<think>\\n'"), ""),
            (
                PLAIN.replace("'<|im_start|>assistant:'", "'<|im_start|>assistant:>>'"),
                "renders the prompt of an earlier",
            ),
        ],
    )
    def test_rewritten_history_is_told(self, template, rewrites):
        """Appending works with a template that rewrites earlier turns, and the report names the change."""
        verdict = chat_of(template).verify()[0]
        assert verdict.rewrites.startswith(rewrites)
        assert bool(rewrites) == bool(verdict.rewrites)

    def test_reasoning_that_is_refused(self):
        """A template may refuse reasoning; then there is none to drop."""
        refuse = "{% for m in messages %}{% if m.thinking %}{{ raise_exception('No.') }}{% endif %}{% endfor %}"
        verdict = chat_of(plain_with(refuse)).verify()[0]
        assert verdict.rewrites == ""

    def test_tokens_that_swallow_what_follows(self):
        """Phi's end-of-turn token takes the line break behind it; a delta has no line break then either."""
        from transformers import AddedToken

        tokenizer = byte_tokenizer(PLAIN.replace("<|im_end|>'", "<|end|>\\n'"), ["<|im_start|>"], eos_token=None)
        tokenizer.add_special_tokens({"eos_token": AddedToken("<|end|>", rstrip=True, special=True)})
        chat = ChatTemplate(tokenizer)
        whole = tokenizer.apply_chat_template(
            [USER, {"role": "assistant", "content": "42"}, USER], add_generation_prompt=True, return_dict=False
        )
        record = [*chat.prompt([USER]), *b"42", tokenizer.eos_token_id]
        assert whole == [*record, *chat.delta([USER], record[-1])]

    def test_slow_tokenizers(self):
        """A tokenizer that is written in Python works too."""
        from transformers import ByT5Tokenizer

        tokenizer = ByT5Tokenizer()
        tokenizer.chat_template = PLAIN.replace("<|im_end|>", "</s>").replace("<|im_start|>", "")
        chat = ChatTemplate(tokenizer)
        assert (tokenizer.eos_token_id,) == chat.stop_token_ids
        assert delta_text(chat, [USER], tokenizer.eos_token_id) == "user:What is 6 * 7?</s>assistant:"


class TestTemplate:
    """Checks of a template before any proof."""

    def test_options(self):
        """Options reach the template; arguments of the rendering are none."""
        chat = chat_of(plain_with("{{ '<|im_start|>' + mood }}"), mood="calm")
        assert chat.tokenizer.decode(chat.prompt([USER])).startswith("<|im_start|>calm")
        with pytest.raises(ConfigError, match="'tokenize' is not an option of a template"):
            ChatTemplate(TOKENIZER, {"tokenize": True})

    def test_unknown_option(self):
        """An option that the template never names has no effect, so it is a mistake."""
        template = "{{ 'calm' if enable_thinking else '' }}" + PLAIN
        assert chat_of(template, enable_thinking=True).prompt([USER]).size
        with pytest.raises(ConfigError, match=r"the chat template has no option 'enable_thin'$"):
            chat_of(template, enable_thin=True)

    def test_named_templates(self):
        """A model may have a separate template for tools."""
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = {"default": CHATML.replace("if tools", "if false"), "tool_use": CHATML}
        assert CHAT.prompt([USER], [TOOL]).tolist() == ChatTemplate(tokenizer).prompt([USER], [TOOL]).tolist()

    @pytest.mark.parametrize(
        ("template", "text"),
        [
            (None, "has no `chat_template`"),
            (PLAIN + " " * (1 << 20), "larger than 1048576 bytes"),
            ("\n{% for message in", "does not parse: line 2: "),
            ("{{ messages[0].content.mood.nothing }}", "fails: .* has no attribute 'mood'"),
            ("{{ messages.append(1) }}", "fails: access to attribute 'append' .* is unsafe"),
        ],
    )
    def test_broken(self, template, text):
        """Each error names the template and its fault, in one line."""
        with pytest.raises(TemplateError, match=text) as caught:
            chat_of(template)
        assert "\n" not in str(caught.value)

    def test_text_of_a_turn(self):
        """The end-of-turn token goes, from lists and arrays; tags and other tokens stay."""
        ids = TOKENIZER.encode("<think>\nhm\n</think>\n<|im_start|><tool_call>{}</tool_call>")
        expected = "<think>\nhm\n</think>\n<|im_start|><tool_call>{}</tool_call>"
        assert expected == CHAT.text(ids)
        assert expected == CHAT.text([*ids, IM_END])
        assert expected == CHAT.text(np.array([*ids, IM_END, IM_END], np.int32))
        assert CHAT.text([]) == ""

    def test_tokenizer_without_eos(self):
        """The template's own end of turn is enough."""
        assert ChatTemplate(byte_tokenizer(PLAIN, eos_token=None)).stop_token_ids == (IM_END,)

    def test_truncation_left_by_others(self):
        """Calls of others on the same tokenizer change nothing here."""
        tokenizer = byte_tokenizer()
        chat = ChatTemplate(tokenizer)
        tokenizer("a long text", truncation=True, max_length=2, padding="max_length")
        assert CHAT.prompt([USER]).tolist() == chat.prompt([USER]).tolist()
