"""An exported page in a real browser, from a `file://` address."""

import re

import pytest
from viewer_runs import HOSTILE, build_episode, mixed_run, runs_inline_script, write_run, write_trace

from turnwise.cli import main

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture
def open_export(tmp_path, visit):
    """Return a function that exports runs and opens the file."""

    def open_file(*runs, options=(), **arguments):
        file = tmp_path / "page.html"
        assert main(["view", *map(str, runs), "--export", str(file), *options]) == 0
        return visit(file.as_uri(), **arguments)

    return open_file


def test_it_lists_filters_and_opens_episodes(tmp_path, open_export):
    """Without a server, the list filters, sorts and searches, and an episode opens with its tokens."""
    page = open_export(mixed_run(tmp_path / "run"))
    rows = page.locator("table.episodes tbody tr")
    sync_api.expect(rows).to_have_count(14)
    sync_api.expect(page.locator(".exported")).to_have_text("exported: 14 of 14 episodes")

    page.get_by_label("Status").select_option("failed")
    sync_api.expect(rows).to_have_count(1)
    page.get_by_label("Status").select_option("")
    page.get_by_label("Tools").select_option("errors")
    sync_api.expect(rows).to_have_count(5)
    page.get_by_label("Tools").select_option("")
    page.locator("#search").fill("ANSWER of task 5")
    page.keyboard.press("Enter")
    sync_api.expect(rows).to_have_count(1)
    page.locator("#search").fill("")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="reward").click()
    sync_api.expect(rows.first).to_contain_text("task-0005/0")

    rows.first.locator("a").click()
    page.get_by_text("record 1: subagent").click()
    page.get_by_role("link", name="Tokens", exact=True).click()
    sync_api.expect(page.locator('[data-i="4"]')).to_have_text("7")


def test_it_has_every_view(tmp_path, open_export):
    """Groups, curves of two runs, times and paths are there as in the served page."""
    page = open_export(mixed_run(tmp_path / "one"), mixed_run(tmp_path / "two"), place="1/groups")
    sync_api.expect(page.locator(".group")).to_have_count(7)
    page.get_by_role("link", name="Training").click()
    page.get_by_label("Compare with").select_option("0")
    sync_api.expect(page.locator(".chart").first.locator("path.line")).to_have_count(8)
    page.get_by_role("link", name="Time").click()
    sync_api.expect(page.locator(".lane").first).to_contain_text("task-0006/0")
    page.goto(re.sub("#.*", "#/1/episode?key=task-0003/0&view=paths", page.url))
    sync_api.expect(page.locator(".path")).to_have_count(2)


def test_times_of_an_episode_are_those_of_the_served_page(tmp_path, open_export, look):
    """The timeline of an episode has the same slices at the same times in a file and in the served page."""
    run = mixed_run(tmp_path / "run")
    mine, other = {"uid": "task-0006/0"}, {"uid": "task-0000/0"}
    episodes = ("episode", 1, 9, other), ("tool", 2, 1, other), ("episode", 3, 4, mine), ("tool", 4, 1, mine)
    write_trace(run, *episodes, ("memory", 0, 2, {"version": 1}), ("memory", 5, 1, {"version": 2}))
    place = "0/episode?key=task-0006/0&view=time"

    shown = []
    for page in (look(run, place=place), open_export(run, place=place)):
        sync_api.expect(page.locator(".timeline")).to_be_visible()
        shown.append(
            (
                page.locator(".ends").inner_text(),
                page.locator(".lane").evaluate_all("all => all.map((each) => each.outerHTML)"),
            )
        )

    assert shown[0] == shown[1]
    assert shown[0][0].split("\n")[-1] == "4.00 s"
    assert sum(lane.count("<rect") for lane in shown[0][1]) == 3


def test_an_episode_that_was_left_out_is_named(tmp_path, open_export):
    """A group shows its episodes; one that is not in the file says so."""
    page = open_export(mixed_run(tmp_path / "run"), options=("--episodes", "task-0000/1"), place="0/groups")
    sync_api.expect(page.locator(".cards li")).to_have_count(4)

    page.locator(".cards a").first.click()

    sync_api.expect(page.get_by_role("alert")).to_have_text(
        "this file has no episode 'task-0000/0': it was exported without it"
    )


def test_hostile_text_is_text_in_a_file(tmp_path, open_export):
    """Markup that ends scripts, and names with markup, are text; nothing runs, and the policy refuses a script."""
    hostile = f"</script><script>document.title='owned'</script><!--<script>{HOSTILE}"
    message = {"role": hostile, "content": hostile, "name": hostile, "tool_calls": [{"function": {"name": hostile}}]}
    episode = build_episode(text=hostile, messages=(message,) * 2, agent_name=hostile, reward=1.0)
    page = open_export(write_run(tmp_path / "<b>&run", [episode]), place="0/episode?key=task-0000/0")

    for view in ("data", "tokens", "turns"):
        page.get_by_role("link", name=view.capitalize(), exact=True).click()
        page.wait_for_selector(f'.tabs [aria-current="page"]:text-is("{view.capitalize()}")')
    shown = page.locator(".message .text").first.inner_text()

    assert shown.startswith("</script><script>document.title='owned'</script><!--<script><script>")
    assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title()


def test_the_policy_of_the_file_blocks_an_inline_script(tmp_path, browser):
    """The browser refuses a script that is put into the exported page."""
    file = tmp_path / "page.html"
    assert main(["view", str(mixed_run(tmp_path / "run")), "--export", str(file)]) == 0
    page = browser.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector("#heading")

    assert not runs_inline_script(page)
    page.close()


def test_a_long_timeline_is_bounded(tmp_path, look, open_export):
    """A file and the served page draw the same blocks of a long timeline, and say how many slices are in them."""
    run = write_run(tmp_path / "run", [build_episode()])
    calls = [("tool", number / 10, 0.05, {"uid": "task-0000/0"}) for number in range(150_000)]
    write_trace(run, ("episode", 100, 0.5, {"uid": "task-0000/0"}), *calls)

    for open_page in (look, open_export):
        page = open_page(run, place="0/time")
        sync_api.expect(page.locator(".bounds")).to_have_text(
            "150,000 short slices are drawn as 1,000 blocks of neighbours. A step or an episode alone shows more."
        )
        assert page.locator(".lane .slice").count() == 1001
        sync_api.expect(page.locator(".slice.slowest")).to_have_count(1)
        sync_api.expect(page.get_by_role("img", name="worker 0, slot 1: 150001 slices")).to_be_visible()
