"""A page that follows real runs while they are made, killed and resumed, and while its server is killed."""

import os
import re
from contextlib import ExitStack

import pytest
from viewer_runs import GUARD_S, ROOT, start_command

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture
def page(browser):
    """A page whose waits end with the state that they wait for."""
    page = browser.new_page()
    page.set_default_timeout(GUARD_S * 1000)
    yield page
    page.close()


@pytest.fixture
def start(tmp_path):
    """A function that starts a command, which ends with the test."""
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(start_command(*map(str, arguments), env=environment))


def count_of(page):
    """Return the number of episodes that the list names."""
    return int(re.sub(r"\D", "", page.locator(".count").inner_text()))


def open_live(page, start, out, place):
    """Start the command for a run that does not exist yet, and open its page; return the command and its address."""
    server = start("view", "--live", out)
    url = server.stdout.readline().strip()
    page.goto(f"{url}#/{place}")
    sync_api.expect(page.locator(".empty").first).to_contain_text("Waiting for the run")
    return server, url


def test_a_page_outlives_its_run_and_its_server(tmp_path, page, start):
    """A page shows the episodes of a run as they end, and goes through a kill of the run and of the server."""
    out = tmp_path / "run"
    server, url = open_live(page, start, out, "0/episodes?order=desc")

    run = start("rollout", "examples/calculator.yaml", "rollout.n=24", "--out", out)
    count = page.locator(".count")
    sync_api.expect(page.locator(".runs option")).to_contain_text("not finished")
    sync_api.expect(count).not_to_have_text("0 episodes")
    first = count_of(page)
    sync_api.expect(count).not_to_have_text(count.inner_text())
    run.kill()
    run.wait()
    killed = count_of(page)

    server.kill()
    server.wait()
    sync_api.expect(page.locator(".connection")).to_contain_text("reconnecting")
    page.locator("table.episodes tbody a").first.click()
    sync_api.expect(page.get_by_role("alert")).to_be_visible()
    assert start("view", "--live", out).stdout.readline().strip() == url
    sync_api.expect(page.locator(".connection")).to_contain_text("live")
    sync_api.expect(page.locator("article #heading")).to_be_visible()
    page.keyboard.press("Escape")

    resumed = start("rollout", "--resume", out)
    sync_api.expect(count).to_have_text("768 episodes")
    sync_api.expect(page.locator(".runs option")).not_to_contain_text("not finished")
    assert resumed.wait() == 0
    assert 0 < first <= killed < 768


def test_a_page_follows_a_training(tmp_path, page, start):
    """Each step of a training appears in the curves and in the list while the training runs."""
    short = ["train.num_steps=2", "train.tasks_per_step=2", "train.validation.limit=2"]
    open_live(page, start, tmp_path / "run", "0/training")

    training = start("train", "examples/train_calculator.yaml", *short, "--out", tmp_path / "run")
    sync_api.expect(page.locator(".chart").first).to_be_visible()
    sync_api.expect(page.locator(".steps a")).to_have_text(["1", "2"])
    page.locator(".steps a").last.click()
    sync_api.expect(page.locator(".count")).to_have_text("16 episodes")

    assert training.wait() == 0


@pytest.mark.ray
def test_a_page_follows_a_run_on_ray(tmp_path, page, start):
    """The driver of a run on Ray writes its folder, so the page shows it as any other."""
    open_live(page, start, tmp_path / "run", "0/episodes")

    run = start("rollout", "examples/calculator.yaml", "runtime=ray", "rollout.n=1", "--out", tmp_path / "run")
    sync_api.expect(page.locator(".count")).to_have_text("32 episodes")
    sync_api.expect(page.locator(".runs option")).not_to_contain_text("not finished")

    assert run.wait() == 0


HELD_STEP = '''\
"""A reward that holds the second step of a training until the test lets it go."""

import asyncio
from pathlib import Path


async def score(episode):
    while episode.global_step > 1 and not Path(%r).exists():
        await asyncio.sleep(0.02)
    return float(str(episode.task.ground_truth) in str(episode.messages[-1]["content"]))
'''


@pytest.mark.ray
def test_a_page_follows_a_training_on_ray(tmp_path, page, start):
    """Steps and held-out points of a training on Ray arrive while its next step still runs on the workers."""
    let_go, out = tmp_path / "let_go", tmp_path / "run"
    (tmp_path / "held_step.py").write_text(HELD_STEP % str(let_go))
    example = (ROOT / "examples/train_calculator.yaml").read_text()
    for name in ("train_calculator.jsonl", "heldout_calculator.jsonl"):
        example = example.replace(f"path: {name}", f"path: {ROOT / 'examples' / name}")
    (tmp_path / "train.yaml").write_text(example + "modules: [./held_step.py]\n")
    short = ["train.num_steps=2", "train.tasks_per_step=2", "train.validation.limit=2", "train.validation.every=1"]
    open_live(page, start, out, "0/training")

    options = ["runtime=ray", "reward=./held_step.py:score", *short]
    training = start("train", tmp_path / "train.yaml", *options, "--out", out)
    steps, held_out = page.locator(".steps a"), page.locator("table.heldout th a")
    sync_api.expect(steps).to_have_text(["1"])
    sync_api.expect(held_out.last).to_have_attribute("href", "#/0/episodes?step=1&validation=true")
    sync_api.expect(page.locator(".chart").first.locator(".dot.c1")).to_have_count(2)
    page.locator(".views a", has_text="Episodes").click()
    sync_api.expect(page.locator("table.running tbody tr")).to_have_count(16)
    assert training.poll() is None

    let_go.touch()
    sync_api.expect(page.locator("table.running tbody tr")).to_have_count(0)
    page.locator(".views a", has_text="Training").click()
    sync_api.expect(steps).to_have_text(["1", "2"])
    sync_api.expect(held_out.last).to_have_attribute("href", "#/0/episodes?step=2&validation=true")
    assert training.wait() == 0


HELD_RUN = """\
model: {path: "package:turnwise_calculator_demo"}
data: {path: %s, limit: 2}
engine: transformers
agent: tool_agent
parser: hermes
tools: [calculator]
modules: [./held.py]
reward: ./held.py:score
rollout: {n: 1, response_length: 128}
"""
HELD_REWARD = '''\
"""A reward that waits until the test lets it go."""

import asyncio
from pathlib import Path


async def score(episode):
    while not Path(%r).exists():
        await asyncio.sleep(0.02)
    return 1.0
'''


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_running_episodes_are_shown_until_they_end(tmp_path, page, start, runtime):
    """Episodes that have not ended are above the list with turns and seconds, and go into the list at their end."""
    let_go = tmp_path / "let_go"
    (tmp_path / "held.py").write_text(HELD_REWARD % str(let_go))
    (tmp_path / "run.yaml").write_text(HELD_RUN % (ROOT / "examples/calculator.jsonl"))
    open_live(page, start, tmp_path / "run", "0/episodes")

    run = start("rollout", tmp_path / "run.yaml", f"runtime={runtime}", "--out", tmp_path / "run")
    rows = page.locator("table.running tbody tr")
    sync_api.expect(rows).to_have_count(2)
    sync_api.expect(rows.first.locator("td").nth(3)).to_contain_text("ago")
    sync_api.expect(rows.first.locator("td").nth(1)).not_to_have_text("0")
    first = rows.first.locator("td").last.inner_text()
    sync_api.expect(rows.first.locator("td").last).not_to_have_text(first)
    sync_api.expect(page.locator(".count")).to_have_text("0 episodes")

    let_go.touch()
    sync_api.expect(page.locator(".count")).to_have_text("2 episodes")
    sync_api.expect(rows).to_have_count(0)
    assert run.wait() == 0
