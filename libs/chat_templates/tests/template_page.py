"""The page `docs/reference/chat-templates.md`: what each chat template that `trl` ships makes of each quirk."""

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

from quirks import FORMS, NO_TOOLS, ON_PAGE, PARTS_ONLY, QUIRKS, REFUSALS, SHOWN, TOOL, outcome_of
from real_templates import chat_of

PAGE = Path(__file__).parents[3] / "docs/reference/chat-templates.md"
TOOLS_ROW = "tools"
"""The first row: whether a template shows tools at all."""
Cells = Mapping[str, Mapping[str, str]]
"""The code of each template, by row."""


def row_of(quirk, chats, shows_tools):
    """
    Return the code of a quirk in each template.

    Args:
        quirk: a key of `QUIRKS`.
        chats: chat templates by name.
        shows_tools: whether a template shows tools, by name; one that does not must refuse all messages with tools.
    """
    row = {}
    for name, chat in chats.items():
        code, with_tools = (outcome_of(name, chat, quirk, tools) for tools in ((), (TOOL,)))
        if shows_tools[name]:
            row[name] = code if code == with_tools else f"{code}/{with_tools}"
        else:
            assert with_tools in REFUSALS, (name, quirk, with_tools)
            row[name] = code
    return row


def tools_row(chats):
    codes = {name: outcome_of(name, chat, "user", (TOOL,)) for name, chat in chats.items()}
    assert set(codes.values()) == {SHOWN, NO_TOOLS}
    return codes


def cells_of(chats):
    """Return the code of each quirk in each template."""
    tools = tools_row(chats)
    shows_tools = {name: code == SHOWN for name, code in tools.items()}
    return {TOOLS_ROW: tools} | {quirk: row_of(quirk, chats, shows_tools) for quirk in QUIRKS}


def byte_chats():
    """Return all usable templates over tokenizers without merges."""
    return {name: chat_of(name) for name in ON_PAGE}


def page_lines(cells: Cells) -> Iterator[str]:
    """Yield the lines of the page."""
    columns = columns_of(cells)
    yield from ("# Chat templates", "", *_INTRODUCTION.splitlines(), "", "## Codes", "")
    yield from ("| code | outcome | meaning |", "| --- | --- | --- |")
    used = {letter for row in cells.values() for code in row.values() for letter in code}
    yield f"| `{SHOWN}` | shown | the template gets the messages as they are given, and shows each text of them |"
    for outcome, meanings in (("mapped", FORMS), ("refused", REFUSALS)):
        for letter, meaning in meanings.items():
            if letter in used:
                yield f"| `{letter}` | {outcome} | {meaning} |"
    yield from ("", *_CODES.splitlines(), "", "## Templates", "")
    yield from (
        *textwrap.wrap(_templates_text(), 120, break_on_hyphens=False),
        "",
        "| column | templates |",
        "| --- | --- |",
    )
    for number, (names, _codes) in enumerate(columns, 1):
        yield f"| {number} | {', '.join(f'`{name}`' for name in names)} |"
    yield from ("", "## Messages", "", *wrapped(_counts_text(cells)), "")
    yield "| messages | " + " | ".join(map(str, range(1, len(columns) + 1))) + " |"
    yield "| --- |" + " --- |" * len(columns)
    for index, row in enumerate(cells):
        yield f"| {row} | " + " | ".join(f"`{codes[index]}`" for _names, codes in columns) + " |"


def columns_of(cells):
    """Return (names, codes) of the groups of templates with equal codes, the largest group first."""
    groups = defaultdict(list)
    for name in next(iter(cells.values())):
        groups[tuple(row[name] for row in cells.values())].append(name)
    return sorted(((names, codes) for codes, names in groups.items()), key=lambda pair: (-len(pair[0]), pair[0]))


def read_cells(text: str) -> Cells:
    """Return the codes that a page has."""
    lines = text.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    columns = {row[0]: re.findall(r"`(\w+)`", row[1]) for row in rows if row[0].isdecimal()}
    body = [row for row in rows if len(row) == len(columns) + 1 and row[0] in (TOOLS_ROW, *QUIRKS)]
    return {
        quirk: {name: code.strip("`") for names, code in zip(columns.values(), codes, strict=True) for name in names}
        for quirk, *codes in body
    }


def wrapped(text):
    return textwrap.wrap(text, 120, break_on_hyphens=False)


def _templates_text():
    return (
        f"The templates of `trl` {version('trl')}, by their file names, in groups with equal codes. Those that end in "
        "`_training` mark the tokens of the model for supervised training. The page leaves out the templates of "
        f"{', '.join(f'`{name}*`' for name in PARTS_ONLY)}, which take contents in parts."
    )


def _counts_text(cells):
    counts = dict.fromkeys(("shown", "mapped", "refused"), 0)
    for row in [row for quirk, row in cells.items() if quirk != TOOLS_ROW]:
        for name, code in row.items():
            without, _, other = code.partition("/")
            with_tools = other or (without if cells[TOOLS_ROW][name] == SHOWN else NO_TOOLS)
            for each in (without, with_tools):
                counts["shown" if each == SHOWN else "refused" if each in REFUSALS else "mapped"] += 1
    num_templates = len(cells[TOOLS_ROW])
    found = ", ".join(f"{number:,} {outcome}" for outcome, number in counts.items())
    return (
        f"{len(QUIRKS)} quirks in {num_templates} templates, each without tools and with one, are "
        f"{sum(counts.values()):,} prompts: {found}, and none that loses a text."
    )


_INTRODUCTION = """\
People write messages that chat templates do not expect: the role `developer`, a second system message, a call whose
content is null. Many templates then leave out a text, without an error. turnwise does not: a prompt shows each text of
its messages, or it is an error that names the template or the message.

This page says which of them it is, for the templates that `trl` ships. The tests compare prompts with the page: with a
tokenizer of bytes, and with the vocabularies of Qwen, Qwen3.6, Mistral (sentencepiece and Tekken) and SmolLM2.
[Use a model](../how-to/use-a-model.md#another-chat-template) shows how a run gets one of them."""

_CODES = """\
A code of several letters has all of these changes. Where the row `tools` has `W`, all messages with tools are refused,
and the codes are those without tools. In the other columns a code holds with tools and without; a second code, after a
slash, is the one with tools.

The page is about prompts. Messages that a run appends later are a matter of their own, which
[token accounting](../explanation/token-accounting.md) describes. A template may still trim a text or quote it as JSON,
and the reasoning of earlier turns is the template's to keep or drop."""
