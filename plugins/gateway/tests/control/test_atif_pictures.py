"""Pictures in the ATIF of a session that is open."""

from turnwise.media import picture_part
from turnwise_gateway.control.atif import _content
from turnwise_testing.inputs.vision import make_picture


def test_a_picture_has_its_name():
    """A picture of an open session has the name of its file in the results of the episode."""
    picture = make_picture()
    content = [{"type": "text", "text": "Look:"}, picture_part(picture), {"type": "text", "text": "So?"}]

    assert f"Look:\n[picture {picture.file_name}]\nSo?" == _content({"role": "user", "content": content})
    assert _content({"role": "user", "content": "Hello."}) is None
