"""
Quirks of messages that people have, in every chat template that the installed `trl` ships.

A prompt shows each text of its messages, in the same or in an equal form, or it is refused with the place of a message.
`docs/reference/chat-templates.md` says which of them it is.
"""

import pytest
from quirks import ON_PAGE, QUIRKS
from real_templates import TEMPLATES, chat_with
from template_page import PAGE, TOOLS_ROW, byte_chats, cells_of, page_lines, read_cells, row_of, tools_row

from turnwise_testing.inputs.vocabularies import VOCABULARIES, missing_package

pytestmark = pytest.mark.skipif(not TEMPLATES.is_dir(), reason="trl is not installed")


def page_cells():
    return read_cells(PAGE.read_text(encoding="utf-8"))


@pytest.mark.many_cases
@pytest.mark.parametrize("quirk", QUIRKS)
def test_no_template_loses_a_text(quirk):
    """The prompt has each text of the messages, or an error says why not, with tools and without, as the page says."""
    cells = page_cells()
    shows_tools = {name: code == "=" for name, code in cells[TOOLS_ROW].items()}

    assert row_of(quirk, byte_chats(), shows_tools) == cells[quirk]


def test_templates_that_show_tools():
    """The page's row of tools."""
    assert tools_row(byte_chats()) == page_cells()[TOOLS_ROW]


def test_the_rest_of_the_page():
    """The page is what `make docs` writes from its codes, and each usable template has one."""
    text = PAGE.read_text(encoding="utf-8")
    title, *rest = page_lines(read_cells(text))
    lines = [line for line in text.splitlines() if not line.startswith("<!--")]

    assert [title, *rest] == [lines[0], *lines[2:]]
    assert all(sorted(row) == ON_PAGE for row in page_cells().values())


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_no_template_loses_a_text_with_a_real_vocabulary(vocabulary):
    """Merges change nothing: all quirks in all templates, with tools and without, are what the page says."""
    if reason := missing_package(vocabulary):
        pytest.skip(f"{vocabulary} {reason}")

    assert cells_of({name: chat_with(vocabulary, name) for name in ON_PAGE}) == page_cells()
