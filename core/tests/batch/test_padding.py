"""Tests of `turnwise.batch.padding`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.batch.padding import Padding, find_alignment, padded_length
from turnwise.errors import PluginError, TrajectoryError

few = settings(max_examples=30, deadline=None)


class TestPadding:
    """Where tokens go."""

    @few
    @given(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5),
        st.integers(0, 2),
        st.integers(0, 2),
        st.sampled_from([(), (2,)]),
    )
    def test_unpad_undoes_pad(self, lengths, more_prompt, more_response, trailing):
        """For all lengths and values."""
        prompts, responses = [p for p, _ in lengths], [r for _, r in lengths]
        padding = Padding(
            prompt_lens=prompts,
            response_lens=responses,
            prompt_length=max(prompts, default=0) + more_prompt,
            response_length=max(responses, default=0) + more_response,
        )
        total = sum(prompts) + sum(responses)
        flat = torch.arange(1, 1 + total * (2 if trailing else 1)).reshape(total, *trailing)
        padded = padding.pad(flat, "token", -7)
        assert (len(lengths), padding.prompt_length + padding.response_length, *trailing) == tuple(padded.shape)
        assert torch.equal(flat, padding.unpad(padded, "token"))
        assert int((padded != -7).sum()) == flat.numel()
        of_responses = padding.unpad(padded[:, padding.prompt_length :], "response")
        assert (sum(responses), *trailing) == tuple(of_responses.shape)
        assert torch.equal(padded[:, padding.prompt_length :], padding.pad(of_responses, "response", -7))
        assert torch.equal(flat, padding.unpad(padding.pad(flat, "row"), "row"))

    @pytest.mark.parametrize("alignment", ["token", "response"])
    @pytest.mark.parametrize("kind", ["bfloat16", "requires_grad", "bool", "float16"])
    def test_values_that_are_no_plain_numbers(self, kind, alignment):
        """A type that numpy has not, or one that gradients flow through, is padded to the same values."""
        padding = Padding(prompt_lens=[2, 0], response_lens=[1, 3], prompt_length=3, response_length=4)
        flat = torch.tensor([1.0, 2, 3, 4, 5, 6] if alignment == "token" else [1.0, 2, 3, 4])
        expected = padding.pad(flat, alignment)
        if kind == "requires_grad":
            flat.requires_grad_()
            padding.pad(flat, alignment).sum().backward()
            assert [1.0] * len(flat) == flat.grad.tolist()
        else:
            flat, expected = (each.to(getattr(torch, kind)) for each in (flat, expected))
        padded = padding.pad(flat, alignment)
        assert flat.dtype == padded.dtype
        assert torch.equal(expected, padded)

    def test_mask(self):
        """Prompts end, and responses start, at column P."""
        padding = Padding.fitting([2, 0], [1, 3], prompt_length=3)
        assert [[0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]] == padding.mask().tolist()

    @pytest.mark.parametrize(
        ("lengths", "fixed", "multiple_of", "expected"),
        [
            ([3, 5], None, 1, 5),
            ([3, 5], None, 4, 8),
            ([3, 8], None, 4, 8),
            ([], None, 4, 0),
            ([3], 7, 4, 7),
            ([3], 3, 1, 3),
        ],
    )
    def test_length(self, lengths, fixed, multiple_of, expected):
        """The longest, rounded up, or the given length."""
        assert expected == padded_length(lengths, fixed, multiple_of, "prompt")

    def test_length_errors(self):
        """A row that does not fit is never cut."""
        with pytest.raises(TrajectoryError, match=r"^row 1 has 5 prompt tokens, 'prompt_length' is 4$"):
            padded_length([3, 5], 4, 1, "prompt")
        with pytest.raises(TrajectoryError, match=r"^'pad_to_multiple_of' must be at least 1, not 0$"):
            padded_length([3], None, 0, "prompt")

    @pytest.mark.parametrize(
        ("shape", "expected"), [((2,), "row"), ((2, 3), "response"), ((2, 3, 1), "response"), ((2, 7), "token")]
    )
    def test_alignment(self, shape, expected):
        """The shape of a field determines its alignment."""
        assert expected == find_alignment("f", shape, 2, 3, 7)

    @pytest.mark.parametrize("shape", [(), (3,), (2, 4), (3, 3)])
    def test_find_alignment_other_shapes(self, shape):
        """Any other shape is refused."""
        with pytest.raises(PluginError, match=r"^field 'f' has shape .*, expected \(2,\), \(2, 3, ...\) or \(2, 7"):
            find_alignment("f", shape, 2, 3, 7)
