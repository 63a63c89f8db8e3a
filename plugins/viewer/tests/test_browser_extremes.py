"""Numbers, texts and files at the edge of what a page can show."""

import json

import pytest
from attrs import evolve
from viewer_runs import build_episode, mixed_run, write_run

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow
expect = sync_api.expect


def test_huge_rewards_fit(tmp_path, look):
    """A reward of any size stays in its place on every page, and no page is wider than the window."""
    run = [build_episode(0, n, reward=reward) for n, reward in enumerate((1e308, -1e308, 5e-324, None))]
    write_run(tmp_path, run)
    lines = [{"step": step, "reward/mean": value} for step, value in enumerate((1e308, -1e308, 0.5, 1e16, 1e16 + 2))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = look(tmp_path)
    base = page.url.partition("#")[0]

    for place in ("episodes", "groups", "training", "time", "episode?key=task-0000/0"):
        page.goto(f"{base}#/0/{place}")
        if place in ("episodes", "groups", "training") or "key" in place:
            expect(page.locator("main")).to_contain_text("e+308")
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), place


@pytest.mark.parametrize("values", [(1e308, -1e308), (-1.23e-300, -1.24e-300), (1e16, 1e16 + 2), (123456.7, 123456.8)])
def test_labels_are_whole(tmp_path, look, values):
    """The labels of a chart are inside of it, whatever the numbers are."""
    lines = [{"step": 10**15 * step, "reward/mean": value} for step, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = look(tmp_path, place="0/training")
    expect(page.locator(".chart text").first).to_be_visible()

    outside = page.locator(".chart > svg").evaluate(
        """(svg) => {
            const box = svg.getBoundingClientRect();
            const isInside = (each) => each.left >= box.left && each.right <= box.right;
            return [...svg.querySelectorAll("text")].filter((each) => !isInside(each.getBoundingClientRect())).length;
        }"""
    )
    assert outside == 0


def test_a_wrong_line_of_metrics_is_named(tmp_path, look):
    """The page of a training names the line, and draws the other ones; so does a comparison for the other run."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, wrong in zip(folders, ("[]", "{"), strict=True):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(f'{{"step": 1, "reward/mean": 0.5}}\n{wrong}\n{{"step": 2}}\n')
    page = look(*folders, place="0/training?with=1")

    expect(page.locator(".problem")).to_have_count(2)
    for number, reason in enumerate(("it is []", "Expecting property name")):
        expect(page.locator(".problem").nth(number)).to_contain_text("metrics.jsonl, line 2: not the metrics of a step")
        expect(page.locator(".problem").nth(number)).to_contain_text(reason)
    expect(page.locator(".chart figcaption")).to_have_text("reward")


def test_a_long_answer_is_marked_as_cut(tmp_path, look):
    """The expected answer that does not fit ends with a mark and its length."""
    long, short = build_episode(0), build_episode(1)
    long = evolve(long, task=evolve(long.task, ground_truth="x" * 199 + "\N{GRINNING FACE}" + "y" * 99))
    page = look(write_run(tmp_path, [long, short]), place="0/episode?key=task-0000/0")
    expected = page.locator(".fact", has_text="expected").locator("dd")

    expect(expected).to_have_text(f"{'x' * 199} … (300 characters)")
    page.goto(page.url.replace("task-0000", "task-0001"))
    expect(expected).to_have_text("1")


def test_each_page_has_its_title(tmp_path, look):
    """The title of the window is the one of the view, or the key of the episode."""
    page = look(mixed_run(tmp_path))
    base = page.url.partition("#")[0]
    places = {"episodes": "Episodes", "groups": "Groups", "training": "Training", "time": "Time"}

    for place, title in (places | {"episode?key=task-0003/0": "task-0003/0", "nothing": "turnwise"}).items():
        page.goto(f"{base}#/0/{place}")
        expect(page).to_have_title(f"{title} · turnwise")
