"""Events that come in an unlucky order: the page shows the state of its address, and keeps the reader's input."""

import re

import pytest
from viewer_runs import build_episode, build_record, mixed_run, several_records, write_run

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow
expect = sync_api.expect

RENDER = """() => {
    const theme = [...document.querySelectorAll("button")].find((each) => each.textContent.startsWith("theme"));
    theme.click();
}"""
"""Lets the whole page render, as a running run does once a second."""


def test_a_render_keeps_the_text_that_is_typed(tmp_path, look):
    """A search that is not complete stays in its field while a running run changes the page."""
    page = look(mixed_run(tmp_path))
    rows = page.locator("table.episodes tbody tr")
    expect(rows).to_have_count(14)

    page.locator("#search").focus()
    page.keyboard.type("answer of")
    page.evaluate(RENDER)
    expect(page.get_by_role("button", name="theme: light")).to_be_visible()
    page.keyboard.type(" task 3")
    page.evaluate(RENDER)
    expect(page.locator("#search")).to_have_value("answer of task 3")
    page.keyboard.press("Enter")

    expect(rows).to_have_count(1)
    expect(page).to_have_url(re.compile("q=answer"))


def test_the_view_is_of_the_address_after_a_render_between_two_changes(tmp_path, look):
    """An address that changes twice, with a render between, shows the view of the second."""
    page = look(mixed_run(tmp_path), place="0/groups")
    expect(page.locator("#heading")).to_have_text("Groups")
    page.evaluate("location.hash = '#/0/episodes'")
    expect(page.locator("#heading")).to_have_text("Episodes")

    page.evaluate(f"""async () => {{
        location.hash = "#/0/time";
        ({RENDER})();
        await new Promise((done) => queueMicrotask(done));
        await new Promise((done) => queueMicrotask(done));
        window.between = document.querySelector("#heading").textContent;
        location.hash = "#/0/episodes";
    }}""")

    expect(page.locator("#heading")).to_have_text("Episodes")
    assert page.evaluate("window.between") == "Time"


def test_tokens_of_another_record_are_not_shown_as_this_one(tmp_path, look):
    """While the tokens of a record of the same length are on their way, the page shows none."""
    page = look(write_run(tmp_path, [several_records()]), place="0/episode?key=task-0000/0&view=tokens")
    expect(page.locator('[data-i="4"]')).to_have_text("6")
    held = []
    page.route(re.compile("record=1"), lambda route: held.append(route))

    with page.expect_request(re.compile("record=1")):
        page.get_by_text("record 1: subagent").click()

    expect(page.get_by_text("Loading tokens")).to_be_visible()
    assert page.locator("[data-i]").count() == 0
    held[0].continue_()
    expect(page.locator('[data-i="4"]')).to_have_text("7")


def test_the_help_takes_its_keys(tmp_path, look):
    """Escape closes the help and nothing else: the page stays at its episode."""
    page = look(mixed_run(tmp_path))
    page.locator("table.episodes tbody a").first.click()
    expect(page.locator("#heading")).to_contain_text("task-0000/0")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()

    page.keyboard.press("Escape")

    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator("#heading")).to_contain_text("task-0000/0")
    page.keyboard.press("Escape")
    expect(page.locator("#heading")).to_have_text("Episodes")


def test_a_token_that_moves_below_the_mouse_is_not_chosen(tmp_path, look):
    """A scroll by a key lets the browser report another token below the mouse; the one of the key stays chosen."""
    run = write_run(tmp_path, [build_episode(trajectories=(build_record(range(10, 900)),))])
    page = look(run, place="0/episode?key=task-0000/0&view=tokens")
    chosen = page.locator(".detail dd").first
    page.locator('[data-i="5"]').hover()
    expect(chosen).to_have_text("5 of 896")
    page.locator(".tokenview").focus()
    page.keyboard.press("PageDown")
    expect(chosen).to_have_text("505 of 896")

    page.locator('[data-i="7"]').dispatch_event("mouseover")
    page.keyboard.press("ArrowRight")

    expect(chosen).to_have_text("506 of 896")


def test_a_link_to_a_far_token_scrolls_when_the_token_is_there(tmp_path, visit, serve):
    """The page scrolls to a far token however late its part of the record is rendered."""
    client = serve(write_run(tmp_path, [build_episode(trajectories=(build_record(range(10, 9000)),))]))
    page = visit(client.url)
    page.set_viewport_size({"width": 420, "height": 400})  # a part of the record is higher than the window
    # As on a machine that is busy: the browser tells late which parts of the record are near.
    page.add_init_script("""
        const Real = IntersectionObserver;
        window.told = [];
        window.IntersectionObserver = class extends Real {
            constructor(call, options) {
                const late = (...found) => window.release ? call(...found) : window.told.push(() => call(...found));
                super(late, options);
            }
        };
    """)
    page.goto(f"{client.url}#/0/episode?key=task-0000/0&view=tokens&token=7700")
    page.reload()
    page.wait_for_function("() => window.told.length > 40")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    page.evaluate("window.release = true; for (const each of window.told.splice(0)) each()")

    expect(page.locator('[data-i="7700"]')).to_be_in_viewport()


def test_a_view_that_failed_after_the_server_was_back_asks_again(tmp_path, serve, browser):
    """A request that a dying server cut, and whose error comes after the page is connected again, is repeated."""
    url = serve(write_run(tmp_path, [build_episode()])).url
    page = browser.new_page()
    held = []
    page.route(re.compile("/episode[?]"), lambda route: route.continue_() if held else held.append(route))
    with page.expect_request(re.compile("/episode[?]")):
        page.goto(f"{url}#/0/episode?key=task-0000/0")

    page.evaluate("dispatchEvent(new Event('turnwise-reconnected'))")
    held[0].abort()

    expect(page.locator("article #heading")).to_contain_text("task-0000/0")
    page.close()
