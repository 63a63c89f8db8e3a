"""Runs of outside agents through the gateway: a record for each branch of a conversation, and calls to other models."""

import json
import os
import re
from importlib.util import find_spec

import pytest
from viewer_runs import ROOT, build_episode, run_command, write_run

from turnwise.record.outside_call import OutsideCall

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


def test_calls_to_other_models_are_below_the_conversation(tmp_path, look):
    """A judge's call has its messages, its answer, its place and the bodies as sent; a failed one is marked."""
    messages = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "Is it 5?"}]
    asked = json.dumps({"messages": messages})
    streamed = "".join(f'data: {{"choices": [{{"delta": {{"content": "{part}"}}}}]}}\n\n' for part in ("It", " is."))
    calls = (
        OutsideCall(model="judge", path="/v1/chat/completions", request=asked, response=streamed, num_turns=1),
        OutsideCall(model="user-model", status=502, request="{}", response="", num_turns=2),
    )
    page = look(write_run(tmp_path, [build_episode(outside_calls=calls)]), place="0/episode?key=task-0000/0")

    shown = page.get_by_label("Calls to other models").locator("> details")
    expect(shown).to_have_count(2)
    expect(shown.first.locator("> summary")).to_contain_text(re.compile("judge.*It is..*status 200, after 1 turn"))
    expect(shown.last.locator(".bad")).to_have_text("status 502, after 2 turns")
    shown.first.locator("> summary").click()
    for text in ("You judge.", "Is it 5?", "It is."):
        expect(shown.first.locator("> .text").get_by_text(text, exact=True)).to_be_visible()
    expect(shown.first.get_by_text("data:")).not_to_be_visible()
    shown.first.get_by_text("as sent").click()
    expect(shown.first.get_by_text("data:")).to_be_visible()
