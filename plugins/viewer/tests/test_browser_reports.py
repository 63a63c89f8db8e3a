"""Reports of an episode: commands with their output, and the report of the tests."""

import re

import pytest
from viewer_runs import HOSTILE, build_episode, write_run

from turnwise import Report

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow
expect = sync_api.expect
REPORTS = (
    Report(title="pytest -q\necho done", text="1 passed\ndone", facts={"exit code": "0", "seconds": 0.25}, num_turns=1),
    Report(title="tests", text="failed: test_two", facts={"reward": 0.0, "exit code": "1"}, failed=True, num_turns=2),
    Report(title=HOSTILE, text=HOSTILE, facts={HOSTILE: HOSTILE}, num_turns=2),
)


def test_reports_are_below_the_conversation(tmp_path, look):
    """Each has its title, its facts and its place; what failed is marked, and no text is more than text."""
    page = look(write_run(tmp_path, [build_episode(reports=REPORTS)]), place="0/episode?key=task-0000/0")

    shown = page.get_by_label("Reports", exact=True).locator("> details")
    expect(shown).to_have_count(3)
    expect(shown.first.locator("> summary")).to_contain_text(
        re.compile("pytest -q.*exit code 0.*seconds 0.25.*after 1 turn")
    )
    expect(shown.first.locator(".bad")).to_have_count(0)
    expect(shown.nth(1).locator(".bad").first).to_have_text(re.compile("reward 0"))
    shown.first.locator("> summary").click()
    expect(shown.first.get_by_text("echo done")).to_be_visible()
    expect(shown.first.get_by_text("1 passed")).to_be_visible()
    shown.nth(1).locator("> summary").click()
    expect(shown.nth(1).get_by_text("tests", exact=True)).to_be_visible()  # an open report keeps its title
    shown.last.locator("> summary").click()
    expect(page).not_to_have_title("owned")
