"""The cache keeps the values that were used last, within its bound."""

from hypothesis import given
from hypothesis import strategies as st

from turnwise.sized_cache import SizedCache

STEPS = st.lists(st.tuples(st.sampled_from("abcd"), st.none() | st.integers(0, 12)))


@given(STEPS, st.integers(0, 20))
def test_any_uses(steps, max_size):
    """It agrees with a list in the order of uses; a step without a size reads."""
    cache, kept = SizedCache(max_size), []  # (key, value, size), the one used last at the end
    for number, (key, size) in enumerate(steps):
        known = next((each for each in kept if each[0] == key), None)
        kept = [each for each in kept if each[0] != key]
        if size is None:
            assert cache.get(key) == (known and known[1])
            kept += [known] if known else []
            continue
        removed = cache.put(key, f"value {number}", size)
        kept.append((key, f"value {number}", size))
        expected = []
        while sum(each[2] for each in kept) > max_size:
            expected.append(kept.pop(0)[0])
        assert removed == expected
        assert cache.size == sum(each[2] for each in kept) <= max_size
        assert len(cache) == len(kept)
        assert all((name in cache) == any(each[0] == name for each in kept) for name in "abcd")
