"""A real run of an outside agent through the gateway, with a record for each branch of its conversation."""

import os
import re
from importlib.util import find_spec

import pytest
from viewer_runs import ROOT, run_command

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("openai"), reason="the client of the outside agent is not installed"),
]
expect = sync_api.expect

CONFIG = """\
model: {path: "package:turnwise_calculator_demo"}
data: {path: %s, limit: 1, columns: {agent_name: null}}
engine: transformers
agent: {name: external, function: "outside_agent:solve"}
parser: hermes
modules: [./outside_agent.py]
reward: ./outside_agent.py:score
rollout: {n: 1, response_length: 96, sampling: {max_tokens: 16}}
"""
AGENT = '''\
"""An outside agent that asks twice after its first answer: a conversation with two branches."""

from openai import AsyncOpenAI


async def solve(task, client):
    async with AsyncOpenAI(base_url=client.openai_base_url, api_key=client.api_key) as model:
        messages = list(task.messages)
        first = await model.chat.completions.create(model=client.model, messages=messages)
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        for question in ("Are you sure?", "Explain it."):
            more = [*messages, {"role": "user", "content": question}]
            await model.chat.completions.create(model=client.model, messages=more)


async def score(episode):
    return [1.0] * len(episode.trajectories)
'''


def test_the_branches_of_an_outside_agent_are_a_tree(tmp_path, monkeypatch, look):
    """The branch is below its parent with its reason, shows its own text, and its replayed tokens are marked."""
    (tmp_path / "outside_agent.py").write_text(AGENT)
    (tmp_path / "run.yaml").write_text(CONFIG % (ROOT / "examples/calculator.jsonl"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run_command("rollout", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run"))
    page = look(tmp_path / "run")
    page.locator("table.episodes tbody a").first.click()

    branch = page.locator(".records li li")
    expect(page.locator(".records > ul > li")).to_have_count(1)
    expect(branch).to_have_count(1)
    expect(branch).to_contain_text("it continues from an earlier turn")
    expect(branch).to_contain_text(re.compile(r"the first \d+ from its parent"))
    text = page.locator("details.message").last
    expect(text).to_contain_text("Are you sure?")
    branch.get_by_role("link").click()
    expect(text).to_contain_text("Explain it.")
    expect(text).not_to_contain_text("Are you sure?")
    page.get_by_role("link", name="Tokens", exact=True).click()
    expect(page.locator(".token.replayed[data-i]").first).to_be_visible()
