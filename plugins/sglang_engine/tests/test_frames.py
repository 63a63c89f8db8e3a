"""Frames between the engine and SGLang's process arrive unchanged."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from turnwise_sglang_engine.frames import Decoder, Frame, pack

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda each: st.lists(each, max_size=3), max_leaves=5
)
heads = st.dictionaries(st.text().filter(lambda name: name != "arrays"), values, max_size=4)
columns = st.sampled_from([np.int32, np.float32, np.uint8]).flatmap(lambda dtype: arrays(dtype, st.integers(0, 20)))
frames = st.builds(Frame, heads, st.lists(columns, max_size=3))


@given(sent=st.lists(frames, max_size=4), cuts=st.lists(st.integers(1, 50), min_size=1, max_size=20))
@settings(deadline=None)
def test_frames_survive_any_cut(sent, cuts):
    """The frames arrive in order, however the bytes are split."""
    data = b"".join(map(pack, sent))
    decoder, received, start, number = Decoder(), [], 0, 0
    while start < len(data):
        end = start + cuts[number % len(cuts)]
        received += decoder.feed(data[start:end])
        start, number = end, number + 1

    assert [each.head for each in sent] == [each.head for each in received]
    for before, after in zip(sent, received, strict=True):
        assert [each.dtype for each in before.arrays] == [each.dtype for each in after.arrays]
        assert [each.tobytes() for each in before.arrays] == [each.tobytes() for each in after.arrays]
