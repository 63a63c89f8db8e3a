"""Scrolling through a long record: every token comes by, and the page never has many of them at once."""

import pytest
from viewer_runs import build_episode, write_run

from turnwise.record.trajectory import Trajectory

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow

NUM_TOKENS = 32_768
SCROLL = """async () => {
    const view = document.querySelector(".tokenview");
    const frame = () => new Promise((done) => requestAnimationFrame(done));
    const seen = new Set();
    let most = 0;
    const visible = () => {
        const window = view.getBoundingClientRect();
        return [...view.querySelectorAll("[data-chunk]")].filter((each) => {
            const box = each.getBoundingClientRect();
            return box.bottom > window.top && box.top < window.bottom;
        });
    };
    for (let at = -1; at !== view.scrollTop; view.scrollTop += 600) {
        at = view.scrollTop;
        while (visible().some((each) => each.childElementCount === 0)) await frame();
        for (const each of visible()) seen.add(Number(each.dataset.chunk));
        most = Math.max(most, document.querySelectorAll("*").length);
        if (at > 0 && view.scrollTop + view.clientHeight >= view.scrollHeight - 1) break;
    }
    return [seen.size, most];
}"""
"""Scrolls to the end, and waits at each place until its tokens are there; returns the chunks seen and most elements."""


def test_the_page_keeps_few_elements_on_the_way_to_the_end(tmp_path, look):
    """On the way through 32,768 tokens each chunk of 200 is rendered, and the page has under 6,000 elements always."""
    record = Trajectory([1])
    record.add_action([*range(NUM_TOKENS - 1)], [-0.1] * (NUM_TOKENS - 1))
    run = write_run(tmp_path, [build_episode(trajectories=(record,))])
    page = look(run, place="0/episode?key=task-0000/0&view=tokens")
    page.wait_for_selector('[data-i="0"]')

    num_chunks, most = page.evaluate(SCROLL)

    assert num_chunks == -(-NUM_TOKENS // 200)
    assert 600 < most < 6000
    sync_api.expect(page.locator(f'[data-i="{NUM_TOKENS - 1}"]')).to_be_in_viewport()
