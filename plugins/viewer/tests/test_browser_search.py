"""The search of the page: before all texts are read, while episodes run, and in a training."""

import json
import time

import pytest
from viewer_runs import build_episode, write_run, write_step

from turnwise_result_files.running_episodes import RUNNING_FILE

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow


def search(page, text):
    """Search for a text."""
    page.locator("#search").fill(text)
    page.keyboard.press("Enter")


def test_the_first_page_is_there_before_the_count(tmp_path, look, reads):
    """A common word has its first page while episodes are unread; the page says so, and then has their exact number."""
    page = look(write_run(tmp_path, [build_episode(task, reward=task) for task in range(120)]))
    count, rows = page.locator(".count"), page.locator("table.episodes tbody tr")
    sync_api.expect(count).to_have_text("120 episodes")
    reads.hold([29])

    search(page, "the answer")

    sync_api.expect(count).to_have_text("116+ episodes, at most 120, 96 % searched")
    sync_api.expect(rows).to_have_count(100)
    page.get_by_role("button", name="reward").click()
    sync_api.expect(count).to_have_text("116+ episodes, at most 120, 96 % searched; the first ones are not known yet")
    reads.released.set()
    sync_api.expect(count).to_have_text("120 episodes")


def write_running(folder, total):
    """Write the file of running episodes, with a time that does not grow old during the test."""
    now = time.time() + 3600
    episode = {"key": "a/1", "agent_name": "x", "worker": "w", "num_turns": total, "num_tokens": 9, "last": "start"}
    state = {"written_at": now + total, "total": total, "episodes": [episode | {"started_at": now, "last_at": now}]}
    (folder / "new").write_text(json.dumps(state))
    (folder / "new").rename(folder / RUNNING_FILE)


def test_a_search_stays_while_the_running_episodes_change(tmp_path, look):
    """New states of running.json change the running episodes alone: hits and half-typed text stay."""
    write_running(write_run(tmp_path, [build_episode(task) for task in range(6)]), 2)
    page = look(tmp_path)
    rows, running = page.locator("table.episodes tbody tr"), page.locator("details.running")
    sync_api.expect(running).to_contain_text("2 running")
    search(page, "answer of task 3")
    sync_api.expect(rows).to_have_count(1)
    page.locator("#search").press_sequentially(" and")

    for total in (3, 4):
        write_running(tmp_path, total)
        sync_api.expect(running.locator("summary")).to_contain_text(f"{total} running")
        sync_api.expect(running.locator("tbody td").nth(1)).to_have_text(str(total))
        sync_api.expect(page.locator("#search")).to_have_value("answer of task 3 and")
        sync_api.expect(page.locator("#search")).to_be_focused()
        sync_api.expect(rows).to_have_count(1)

    page.keyboard.press("Enter")
    sync_api.expect(rows).to_have_count(0)
    (tmp_path / RUNNING_FILE).unlink()
    sync_api.expect(running).to_have_count(0)
    sync_api.expect(page.locator(".count")).to_have_text("0 episodes")


def test_a_search_in_a_training_covers_its_steps(tmp_path, look):
    """A search finds the episodes of all steps, also of one that is written meanwhile, and of one step alone."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    for step in (1, 2):
        write_step(tmp_path, step, [build_episode(task) for task in range(4)], 0.5)
    page = look(tmp_path)
    rows = page.locator("table.episodes tbody th[scope=row] a")
    sync_api.expect(rows).to_have_count(8)

    search(page, "answer of task 2")
    sync_api.expect(rows).to_have_text(["task-0002/0@1", "task-0002/0@2"])
    write_step(tmp_path, 3, [build_episode(task) for task in range(4)], 0.5)
    sync_api.expect(rows).to_have_text(["task-0002/0@1", "task-0002/0@2", "task-0002/0@3"])

    page.get_by_label("Step").fill("3")
    page.keyboard.press("Enter")
    sync_api.expect(rows).to_have_text(["task-0002/0@3"])
