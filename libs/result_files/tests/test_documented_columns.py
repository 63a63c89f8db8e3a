"""The reference describes the columns of a run's file."""

import re
from pathlib import Path

from turnwise_result_files.row_schema import SCHEMA, VERSION

PAGE = Path(__file__).parents[3] / "docs/reference/results.md"


def test_every_column_is_documented():
    """The table has each column once, no other one, and the version of the file."""
    text = PAGE.read_text(encoding="utf-8").partition("## Files")[2]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)

    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(SCHEMA.names)
    assert f"`turnwise_schema`, now {VERSION}" in text.replace("\n", " ")
