"""The table of bytes decodes as the tokenizer itself does."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from turnwise_chat_templates.byte_decoder import ByteDecoder
from turnwise_chat_templates.render import HuggingFaceTokenizer
from turnwise_testing.inputs.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
# Letters of no byte, a space, a letter of two bytes that is also the letter of one, and a special token.
TOKENIZER.add_tokens([*map(AddedToken, ["日本", "two words", "é", "Ġx"]), AddedToken("<x>", special=True)])
BACKEND = TOKENIZER.backend_tokenizer
NUM_IDS = BACKEND.get_vocab_size()
BYTES = st.sampled_from([*range(64, 80), *range(0x80, 0x100, 7), 0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0xED, 0xA0])


class TestByteDecoder:
    """Texts of ids."""

    @given(st.lists(st.integers(0, NUM_IDS + 3)))
    def test_any_ids(self, ids):
        """Any ids have the same text, among them added tokens and ids that no token has."""
        assert BACKEND.decode(ids, skip_special_tokens=False) == HuggingFaceTokenizer(TOKENIZER).decode(ids)

    @given(st.lists(BYTES))
    def test_broken_characters(self, ids):
        """Bytes that are no UTF-8 become the same number of U+FFFD."""
        assert BACKEND.decode(ids, skip_special_tokens=False) == HuggingFaceTokenizer(TOKENIZER).decode(ids)

    def test_token_added_later(self):
        """A token that is added after its id was decoded has its text from then on."""
        tokenizer = byte_tokenizer()
        decoder, new = HuggingFaceTokenizer(tokenizer), tokenizer.backend_tokenizer.get_vocab_size()
        assert decoder.decode([65, new]) == "A"
        tokenizer.add_tokens(["<later>"])
        assert decoder.decode([65, new]) == "A<later>"

    def test_other_decoders(self):
        """A tokenizer that changes texts when it joins them decodes itself."""
        backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        assert ByteDecoder.of(backend) is None
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)])
        assert ByteDecoder.of(backend) is None
        assert ByteDecoder.of(None) is None
        assert isinstance(ByteDecoder.of(BACKEND), ByteDecoder)
