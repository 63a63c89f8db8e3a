"""Results of tools with pictures between texts: order, changes and cuts."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise import ToolResult
from turnwise.media import Picture, find_picture
from turnwise.showing import change_texts, cut_text, join_parts, split_parts

PICTURES = [find_picture(b"\x89PNG\r\n\x1a\n" + name, "image/png") for name in (b"cat", b"dog", b"owl")]
PARTS = st.lists(st.text("ab\n", max_size=4) | st.sampled_from(PICTURES), max_size=8)


def joined(parts: list[str | Picture], separator: str = "") -> list[str | Picture]:
    """Return parts with texts beside each other as one, without empty texts."""
    found: list[str | Picture] = []
    was_text = False
    for part in parts:
        if isinstance(part, str) and was_text:
            part = f"{found.pop()}{separator}{part}"
        found.append(part)
        was_text = isinstance(part, str)
    return [part for part in found if part != ""]


@given(PARTS, st.sampled_from(["", "\n"]))
def test_parts_keep_their_order(parts: list[str | Picture], separator: str) -> None:
    """A result has the parts that it is made of."""
    assert split_parts(join_parts(parts, separator)) == joined(parts, separator)


@given(st.text(max_size=5), st.lists(st.sampled_from(PICTURES)), st.lists(st.integers(0, 9)).map(sorted))
def test_any_places(text: str, pictures: list[Picture], places: list[int]) -> None:
    """A wrapper may replace the text alone: no character and no picture is lost, and pictures keep their order."""
    parts = split_parts(ToolResult(text=text, pictures=tuple(pictures), picture_places=tuple(places)))
    assert "".join(part for part in parts if isinstance(part, str)) == text
    assert [part for part in parts if not isinstance(part, str)] == pictures


def test_pictures_without_places_are_behind_the_text() -> None:
    """A tool gives a text and its pictures."""
    assert split_parts(ToolResult(text="Seen:", pictures=tuple(PICTURES[:2]))) == ["Seen:", *PICTURES[:2]]


@given(PARTS)
def test_changed_texts(parts: list[str | Picture]) -> None:
    """Each text is changed where it is, also to a longer or an empty one."""
    result = evolve(join_parts(parts), reward=0.5)
    for change in (lambda text: text.replace("a", "longer"), lambda _text: "", str.upper):
        changed = change_texts(result, change)
        expected = [part if isinstance(part, Picture) else change(part) for part in split_parts(result)]
        assert (split_parts(changed), changed.reward) == (joined(expected), 0.5)


@given(PARTS, st.data())
def test_cut_texts(parts: list[str | Picture], data: st.DataObject) -> None:
    """The text is cut as a text without pictures is, and each picture stays between the same characters."""
    result = join_parts(parts)
    size = len(result.text)
    head = data.draw(st.integers(0, size))
    tail = data.draw(st.integers(0, size - head))
    shown = split_parts(cut_text(result, head, tail, "..."))
    text = "".join(part for part in shown if isinstance(part, str))
    assert text == result.text[:head] + "..." + result.text[size - tail :]
    assert [part for part in shown if not isinstance(part, str)] == list(result.pictures)
    places = (len("".join(p for p in shown[:i] if isinstance(p, str))) for i, p in enumerate(shown) if p in PICTURES)
    for before, after in zip(result.picture_places, places, strict=True):
        if before <= head:
            assert after == before
        elif before >= size - tail:
            assert len(text) - after == size - before
        else:
            assert after == head + len("...")
