"""Areas."""


def calc(s):
    """Return the area of a shape: ("square", side) or ("rectangle", width, height)."""
    if s[0] == "square":
        return s[1] ** 2
    if s[0] == "rectangle":
        return s[1] * s[2]
    raise ValueError("unknown shape: " + s[0])
