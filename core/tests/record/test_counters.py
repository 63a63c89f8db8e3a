"""The running totals of an episode."""

import attrs

from turnwise.record.step_results import Counters


def test_a_copy_of_counters_has_every_value_and_shares_no_container():
    """A step that changes the counters leaves the mark at its start as it was."""
    counters = Counters(*range(8), {"a": 1.0}, {"(1, 2)": 3}, [0, 1], [2])
    copy = Counters(*counters.mark())
    for attribute in attrs.fields(Counters):
        value, copied = getattr(counters, attribute.name), getattr(copy, attribute.name)
        assert value == copied
        assert isinstance(value, int) or value is not copied
