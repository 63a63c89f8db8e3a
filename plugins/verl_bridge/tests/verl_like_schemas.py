"""verl's response of a tool, for processes without verl."""

from attrs import frozen


@frozen
class ToolResponse:
    """Text and pictures."""

    text: str | None = None
    image: list | None = None
    video: list | None = None
