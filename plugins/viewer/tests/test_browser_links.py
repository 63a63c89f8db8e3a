"""Links to an episode, a turn and a token, and the buttons that copy an episode."""

import json
import re
import subprocess
import sys

import pytest
from viewer_runs import HOSTILE, build_episode, build_record, mixed_run, write_run

from turnwise.cli import main

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow
expect = sync_api.expect


def test_a_link_leads_to_a_turn(tmp_path, look):
    """The link of a message is an address that opens the episode at that message, in a new page too."""
    run = write_run(tmp_path, [build_episode(0, text="\n".join(map(str, range(400)))), build_episode(1)])
    page = look(run, place="0/episode?key=task-0000/0")

    page.get_by_role("link", name="link to message 3").click()
    expect(page).to_have_url(re.compile(r"#/0/episode\?key=task-0000%2F0&turn=3$"))
    chosen = page.locator(".message.chosen")
    expect(chosen).to_have_attribute("aria-label", "assistant message 3")
    expect(chosen).to_be_in_viewport()

    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(chosen).to_have_attribute("aria-label", "assistant message 3")
    expect(chosen).to_be_in_viewport()


def test_a_turn_leads_to_its_tokens(tmp_path, look):
    """An answer links to the first token of its turn in the record, and a message that is no turn has no such link."""
    page = look(mixed_run(tmp_path), place="0/episode?key=task-0000/0")
    expect(page.get_by_role("link", name=re.compile("^tokens of message"))).to_have_count(2)

    page.get_by_role("link", name="tokens of message 3").click()

    second_turn = build_record().turns()[1][0]
    expect(page.locator(".detail dd").first).to_have_text(f"{second_turn} of 8")
    expect(page).to_have_url(re.compile(f"token={second_turn}$"))


@pytest.mark.parametrize("exported", [False, True])
def test_an_episode_is_copied_as_a_test_that_runs(tmp_path, look, visit, exported):
    """The copied test passes with pytest, and the other buttons copy JSON, also in an exported page."""
    run = write_run(tmp_path / "run", [build_episode(1), build_episode(0, text=HOSTILE)])
    place = "0/episode?key=task-0000/0"
    if exported:
        file = tmp_path / "page.html"
        assert main(["view", str(run), "--export", str(file)]) == 0
        page = visit(file.as_uri(), place=place)
    else:
        page = look(run, place=place)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])

    def copy(label):
        button = page.get_by_text(label, exact=True).element_handle()
        button.click()
        page.wait_for_function("(button) => button.textContent === 'copied'", arg=button)
        return page.evaluate("navigator.clipboard.readText()")

    assert json.loads(copy("Copy as JSON"))["key"] == "task-0000/0"
    assert json.loads(copy("Copy messages"))[0]["role"] == "user"
    file = tmp_path / "test_copied.py"
    file.write_text(copy("Copy as a test"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stdout
    assert b"2 passed" in done.stdout
