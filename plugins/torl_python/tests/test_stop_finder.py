"""The stop finder finds the string at its first occurrence, for any tokenization, and with few requests."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_torl_python.stop_finder import StopMatch, build_stop_finder, cached_stop_finder

STOP = "```output"
PIECES = ("`", "``", "```", "o", "out", "put", "t", "tp", "output", "outputs", "u", "p", "ut", " ", "a", "\n", "é")


class Pieces:
    """A tokenizer with a list of texts as its vocabulary."""

    eos_token_id = None

    def __init__(self, vocabulary):
        self.vocabulary = list(vocabulary)

    def encode(self, text):
        raise AssertionError("nothing is encoded")

    def decode(self, token_ids):
        return "".join(self.vocabulary[index] for index in token_ids)


def generate(ids, finder, tokenizer):
    """
    Write these ids as an engine with stop ids does, driven as the agent drives it.

    Return the number of ids at which the stop string was found, None if never, and the number of requests.
    """
    written, num_requests, match = 0, 0, StopMatch.NONE
    while written < len(ids):
        num_requests += 1
        if match is StopMatch.PARTIAL:
            written += 1
        else:
            rest = ids[written:]
            written += next((i + 1 for i, token_id in enumerate(rest) if token_id in finder.stop_token_ids), len(rest))
        match = finder.match(tokenizer.decode(ids[:written]))
        if match is StopMatch.COMPLETE:
            return written, num_requests
    return None, num_requests


def expected_end(texts, stop):
    """Return the number of tokens after which the text contains the stop string, by reading every prefix."""
    return next((end for end in range(1, len(texts) + 1) if stop in "".join(texts[:end])), None)


@given(st.lists(st.sampled_from(PIECES), max_size=40), st.lists(st.sampled_from(PIECES), max_size=30))
@example(["```", "output"], [])
@example(["`", "```", "out", "put"], [])
@example(["``", "`o", "u", "t", "puts\n"], ["```out", "put"])
def test_any_tokenization_of_any_text(texts, sample):
    """The string is found with the token that ends its first occurrence, for any vocabulary and any anchor."""
    vocabulary = sorted({*texts, *PIECES})
    tokenizer = Pieces(vocabulary)
    ids = [vocabulary.index(text) for text in texts]
    sample_ids = [vocabulary.index(text) for text in sample if text in vocabulary]
    finder = build_stop_finder(enumerate(vocabulary), STOP, sample_ids)
    assert generate(ids, finder, tokenizer)[0] == expected_end(texts, STOP)


@given(st.text(alphabet="`outp \ns", max_size=40), st.data())
def test_any_split_of_a_text(text, data):
    """The same holds for a text that is split at random positions."""
    text = data.draw(st.sampled_from([text, text + STOP, text + STOP + text]))
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=30))})
    texts = [text[start:stop] for start, stop in pairwise(cuts)]
    vocabulary = sorted(set(texts))
    finder = build_stop_finder(enumerate(vocabulary), STOP)
    ids = [vocabulary.index(piece) for piece in texts]
    assert generate(ids, finder, Pieces(vocabulary))[0] == expected_end(texts, STOP)


@given(st.text(alphabet="ab", min_size=1, max_size=6), st.lists(st.sampled_from(["a", "b", "ab", "aab", "c"])))
def test_any_stop_string(stop, texts):
    """The same holds for strings that overlap themselves."""
    vocabulary = ["a", "b", "ab", "aab", "c"]
    finder = build_stop_finder(enumerate(vocabulary), stop)
    ids = [vocabulary.index(text) for text in texts]
    assert generate(ids, finder, Pieces(vocabulary))[0] == expected_end(texts, stop)


def test_a_usual_tokenization_takes_one_request():
    """If the string is two tokens, neither fences nor words with a common ending stop the engine."""
    vocabulary = ["```", "output", "python", "\n", "put", "t", "print(1)", " output", "`"]
    sample = ["```", "python", "\n", "print(1)", "\n", "```", "`", " output", "t"]
    finder = build_stop_finder(enumerate(vocabulary), STOP, [vocabulary.index(text) for text in sample])
    assert finder.stop_token_ids == (vocabulary.index("output"),)
    texts = ["```", "python", "\n", "print(1)", "t", "put", " output", "\n", "```", "\n", "```", "output"]
    assert generate([vocabulary.index(text) for text in texts], finder, Pieces(vocabulary)) == (len(texts), 1)


def test_the_vocabulary_of_a_tokenizer_is_read_to_its_end():
    """Every block of ids is read, also of a tokenizer that raises for unknown ids, and each tokenizer only once."""
    wide = Pieces(["x"] * 1500 + ["output", "```"])
    finder = cached_stop_finder(_Encoding(wide.vocabulary), STOP)
    assert set(finder.stop_token_ids) <= {1500, 1501}
    assert finder.stop_token_ids
    tokenizer = _Encoding(wide.vocabulary)
    assert cached_stop_finder(tokenizer, STOP) is cached_stop_finder(tokenizer, STOP)


def test_a_real_tokenizer():
    """With one byte per token, the anchor is one character."""
    tokenizer = byte_tokenizer()
    finder = cached_stop_finder(tokenizer, STOP)
    assert [chr(token_id) for token_id in finder.stop_token_ids] == [STOP[finder.anchor]]


class _Encoding(Pieces):
    """A tokenizer that encodes only the empty text."""

    def encode(self, text):
        assert text == ""
        return []
