"""Sampling parameters at the ends of their ranges: float32 cannot hold all of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.types import SamplingParams
from turnwise_transformers_engine.fused.batch_sampling import make_columns, sample_rows, sampling_values
from turnwise_transformers_engine.layouts.row_sampling import sample

LEAST = 5e-324
LARGEST = 1.7e308
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, LEAST, 1e-5, 1.0, 1e39, LARGEST]) | st.floats(0, LARGEST),
    top_k=st.sampled_from([-1, 1, 3, 2**62]),
    top_p=st.sampled_from([1.0, 1e-44, 1e-46, 1e-300, LEAST]) | st.floats(0, 1, exclude_min=True),
)
EXTREMES = (
    {"top_p": 1e-46},
    {"top_p": LEAST},
    {"top_p": LEAST, "top_k": 2**62},
    {"temperature": LEAST},
    {"temperature": LARGEST},
    {"temperature": LARGEST, "top_p": 0.5},
)


@pytest.fixture(params=["fused", "generic"])
def decoder(request):
    """Both decoders, also in the quick tests."""
    return request.param


def sample_in_a_batch(logits, params):
    values = [sampling_values(each, seed, logits.shape[1]) for seed, each in enumerate(params)]
    return sample_rows(logits, make_columns(values, [0] * len(values)))


def sample_for_layouts(logits, params):
    return sample(logits, params, [torch.Generator().manual_seed(seed) for seed in range(len(params))])


@pytest.mark.parametrize("sampler", [sample_in_a_batch, sample_for_layouts])
@settings(deadline=None)
@given(params=st.lists(PARAMS, min_size=1, max_size=4), data=st.data())
def test_each_row_gets_an_id_of_its_grammar(sampler, params, data):
    """For all valid parameters the id is one that a grammar allows, and its log-probability is finite."""
    allowed = data.draw(st.lists(st.lists(st.booleans(), min_size=8, max_size=8).filter(any), min_size=4, max_size=4))
    mask = torch.tensor(allowed[: len(params)])
    seed = data.draw(st.integers(0, 2**32))
    logits = 3 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))

    ids, logprobs = sampler(logits.masked_fill(~mask, -torch.inf), params)

    assert np.isfinite(logprobs).all()
    assert all(allowed[row][token] for row, token in enumerate(ids))


@pytest.mark.parametrize("options", EXTREMES, ids=str)
def test_an_engine_samples_at_the_extremes(tiny_model, serve, ask, decoder, options):
    """Both decoders sample the turn: no parameter ends the engine's thread."""
    result = serve(tiny_model, lambda engine: engine.generate(ask(**options)))

    assert len(result.token_ids) == 16
    assert np.isfinite(result.logprobs).all()
