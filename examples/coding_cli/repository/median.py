"""The middle of a list of numbers."""


def median(numbers: list[float]) -> float:
    """Return the number in the middle, or the mean of the two in the middle."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle]
