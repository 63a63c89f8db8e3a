"""Docstrings stay in plain English: a ratchet on words that make them hard to read."""

from __future__ import annotations

from pathlib import Path

import prose
import pytest

LIMITS = {
    "what": 3.0,
    "nobody / somebody": 0.2,
    "stand(s)": 0.0,
    "go(es) on / gone on": 0.0,
    "begin / began / begun": 0.5,
    "that of / those of": 0.3,
    "those that": 0.0,
    "of its own": 0.0,
}
"""Most uses in 1,000 words of docstrings."""
MAX_OPENER_SHARE = 0.01
"""Largest share of docstrings whose first sentence opens with What, Who, Whose, Where or How."""


def test_docstrings_of_sources_are_plain() -> None:
    """Lower a limit when the count falls; never raise one. `python tests/prose.py --list` shows the places."""
    counts = prose.count(prose.source_files(prose.SOURCES))

    assert counts.num_docstrings > 1000
    assert counts.opener_share <= MAX_OPENER_SHARE
    assert {name: limit for name, limit in LIMITS.items() if counts.per_thousand(name) > limit} == {}


@pytest.mark.parametrize(
    ("docstring", "openers", "words"),
    [
        ("What serves tokens.", 1, {"what": 1}),
        ("Who has the devices", 1, {}),
        ("What is a path?", 0, {"what": 1}),
        ("Return what it holds, where it stands.", 0, {"what": 1, "stand(s)": 1}),
        ("Continue an episode that has begun; it goes on.", 0, {"begin / began / begun": 1, "go(es) on / gone on": 1}),
        ("A thread of its own, for those that wait in tests of its own code.", 0, {"those that": 1, "of its own": 1}),
        ("Somewhat whatever understand.", 0, {}),
    ],
)
def test_words_are_counted(tmp_path: Path, docstring: str, openers: int, words: dict[str, int]) -> None:
    """Whole words count, and questions are no relative openers."""
    file = tmp_path / "a.py"
    file.write_text(f'def f():\n    """{docstring}"""\n', encoding="utf-8")

    counts = prose.count([file])

    assert openers == counts.openers
    assert words == {name: count for name, count in counts.words.items() if count}
    assert 1 == counts.num_docstrings


def test_texts_below_attributes_count(tmp_path: Path) -> None:
    """The text below a constant or a field is documentation as well; other strings are not."""
    file = tmp_path / "a.py"
    file.write_text('"""A."""\nx = "what"\n"""What x is."""\nclass C:\n    y: int\n    """Y."""\n', encoding="utf-8")

    counts = prose.count([file])

    assert (3, 1) == (counts.num_docstrings, counts.words["what"])
