"""A run whose chat template has a rule by length or position says so, once, and counts the episodes."""

import json

import pytest

from turnwise.cli import main
from turnwise_result_files import read_results
from turnwise_testing.inputs.tokenizers import CHATML
from turnwise_testing.whole_runs.scripted_run import SITE, write_scripted_run

USER = """
import turnwise


class User:
    async def create(self, task):
        return None

    async def respond(self, session, messages):
        turns = sum(message["role"] == "assistant" for message in messages)
        return turnwise.Reply(content="more " * 500, should_terminate=turns > 2)

    async def release(self, session): ...
"""
CUTS = CHATML.replace("'\\n' + message.content", "'\\n' + message.content[:2000]")


@pytest.mark.parametrize(
    ("template", "every", "compared", "differing"),
    [(CUTS, 1, 4, 4), (CUTS, 2, 2, 2), (CUTS, 0, 0, 0), (CHATML, 1, 4, 0)],
    ids=["each", "every other", "none", "no rule"],
)
def test_a_rule_by_length(tmp_path, monkeypatch, capsys, template, every, compared, differing):
    """The warning names the template's file and the first difference."""
    monkeypatch.syspath_prepend(str(tmp_path / SITE))
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "cuts.jinja").write_text(template)
    config = write_scripted_run(
        tmp_path,
        num_tasks=4,
        model={"path": "model", "chat_template": "cuts.jinja"},
        agent="tool_agent",
        interaction="./user.py:User",
        modules=["./user.py"],
        rollout={"prompt_length": 512, "response_length": 16384},
        chat={"name": "jinja", "check_every": every},
        plugins=["scripted_kit", "tool_agent", "commands"],
    )

    assert main(["rollout", str(config), "--out", str(tmp_path / "out"), "telemetry.log_format=json"]) == 0

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    warnings = [line for line in lines if line["event"] == "the chat template renders a conversation differently"]
    assert len(warnings) == bool(differing)
    assert all("cuts.jinja" in line["template"] and "instead of" in line["at"] for line in warnings)
    metrics = [result.metrics.extra for result in read_results(tmp_path / "out")]
    assert sum(each.get("template/compared_conversations", 0) for each in metrics) == compared
    assert sum(each.get("template/differing_conversations", 0) for each in metrics) == differing
