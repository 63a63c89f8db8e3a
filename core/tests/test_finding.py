"""Tests of `turnwise.protocols.Finding`."""

import pytest

from turnwise.protocols import Finding


def test_the_state_of_a_finding_is_one_of_four():
    """A misspelled state is an error where the finding is made."""
    with pytest.raises(ValueError, match="'state' must be in"):
        Finding("Python", "fine", "3.12")
