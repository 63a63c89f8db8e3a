"""The base of chat templates: the test kit's tokenizer, ids of long prompts, and error texts."""

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from turnwise_chat_templates.probe import common_start, excerpt
from turnwise_chat_templates.render import HuggingFaceTokenizer, PromptCache
from turnwise_testing.inputs.tokenizers import SPECIAL_TOKENS, TAGS, byte_tokenizer

TOKENIZER = byte_tokenizer()
CONTENTS = st.lists(st.sampled_from(["x", "\n", "é", *SPECIAL_TOKENS, *TAGS])).map("".join)


class TestByteTokenizer:
    """The tokenizer that needs no download."""

    @given(st.text())
    def test_round_trip(self, text):
        """Any text decodes to itself, and a byte's id is the byte unless a tag spells it."""
        ids = TOKENIZER.encode(text)
        assert text == TOKENIZER.decode(ids)
        assert any(tag in text for tag in (*SPECIAL_TOKENS, *TAGS)) or list(text.encode()) == ids

    def test_special_tokens_and_tags(self):
        """Special tokens may be skipped in decoding, tags are not."""
        ids = TOKENIZER.encode("a<|im_start|><tool_call>b</think><|im_end|>")
        assert ids == [97, 257, 259, 98, 264, 258]
        assert TOKENIZER.decode(ids, skip_special_tokens=True) == "a<tool_call>b</think>"
        assert (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (258, 256)

    def test_other_special_tokens(self):
        """The tokens of another template take the place of ChatML's."""
        tokenizer = byte_tokenizer(None, ["<a>", "<b>"], tags=["<b>", "<c>"], bos_token="<s>", eos_token="<b>")
        assert tokenizer.encode("<a><b><s><c>") == [256, 257, 258, 259]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (258, 257, None)
        assert byte_tokenizer(None, [], eos_token=None).eos_token_id is None


class TestPromptCache:
    """Equal prompts are encoded once, and so are the beginnings that prompts share."""

    def test_equal_prompts_are_encoded_once(self):
        """The samples of a group share an encoding, and none can change another's ids."""
        encoded = []

        class Counting(HuggingFaceTokenizer):
            def encode(self, text):
                encoded.append(text)
                return super().encode(text)

        cache = PromptCache(Counting(TOKENIZER))
        texts = [f"<|im_start|>{index}" for index in range(5)]
        for text in [text for text in texts for _sample in range(8)]:
            ids = cache.encode(text)
            assert TOKENIZER.encode(text) == ids.tolist()
            ids[:] = 0
        assert texts == encoded

    def test_keeps_few_prompts(self):
        """The oldest prompt is dropped when there are too many."""
        cache = PromptCache(HuggingFaceTokenizer(TOKENIZER))
        texts = [f"<|im_start|>{index}" for index in range(cache.max_prompts + 3)]
        for text in texts:
            cache.encode(text)
        assert texts[3:] == list(cache._prompts)

    @given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), CONTENTS), max_size=6))
    def test_ids_are_those_of_the_whole(self, prompts):
        """In any order, the ids equal an encoding without memory."""
        cache = PromptCache(HuggingFaceTokenizer(TOKENIZER))
        systems = ["<|im_start|>" + str(index) * 600 + "<|im_end|>\n" for index in range(3)]
        for index, content in prompts:
            text = f"{systems[index]}<|im_start|>{content}"
            assert TOKENIZER.encode(text) == cache.encode(text).tolist()

    def test_learns_few_heads(self):
        """The oldest head is dropped when there are too many; short ones are not worth it."""
        cache = PromptCache(HuggingFaceTokenizer(TOKENIZER))
        for text in [text for index in range(12) for text in (f"{index:600d}<|im_end|>a", f"{index:600d}<|im_end|>b")]:
            cache.encode(text)
        cache.encode("short<|im_end|>")
        cache.encode("short<|im_end|>")
        assert [f"{index:600d}<|im_end|>" for index in range(4, 12)] == list(cache._heads)

    def test_keeps_no_long_texts(self):
        """Texts beyond a bound are encoded once, and none of them is kept."""
        cache = PromptCache(HuggingFaceTokenizer(TOKENIZER))
        for end in "ab":
            text = "x" * cache.max_chars + "<|im_end|>" + end
            assert TOKENIZER.encode(text) == cache.encode(text).tolist()
        assert not cache._heads
        assert not cache._prompts
        assert cache._last == ""

    def test_threads_share_a_cache(self):
        """Several threads that learn heads at once get the ids of the whole texts."""
        cache = PromptCache(HuggingFaceTokenizer(TOKENIZER))
        texts = [f"{index:600d}<|im_end|>{end}" for index in range(40) for end in "ab"]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda text: cache.encode(text).tolist(), texts))
        assert found == [TOKENIZER.encode(text) for text in texts]

    def test_heads_that_do_not_stand_alone(self):
        """A special token that changes the text before it makes no head."""
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens([AddedToken("<|left|>", lstrip=True, special=True)], special_tokens=True)
        cache = PromptCache(HuggingFaceTokenizer(tokenizer))
        for end in "ab":
            text = "x" * 600 + "  <|left|>" + end
            assert tokenizer.encode(text) == cache.encode(text).tolist()
        assert not cache._heads


class TestExcerpts:
    """Where two texts part."""

    def test_excerpts(self):
        """Error texts show where two texts part."""
        assert common_start("abcd", "abxd") == 2
        assert [common_start(*pair) for pair in (("", "a"), ("b", "a"), ("abc", "abc"))] == [0, 0, 3]
        assert excerpt("x" * 50 + "abc", "x" * 50 + "abd", 20) == f"'{'x' * 13}abc' instead of '{'x' * 13}abd'"
