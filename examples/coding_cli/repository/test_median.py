"""Tests of `median`: run `python test_median.py`."""

from median import median

assert median([5, 3, 1]) == 3, "the number in the middle"
assert median([4, 1, 2, 3]) == 2.5, "the mean of the two in the middle"
print("all tests pass")
