"""Agents render and encode long texts beside the event loop, which continues the other episodes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from option_runs import command, config_of, write_config, write_site

from turnwise import messages
from turnwise_chat_templates.template import ChatTemplate
from turnwise_result_files import read_results

AGENTS: dict[str, dict[str, Any]] = {
    "single_turn": {},
    "tool_agent": {},
    "parallel_thinking": {},
    "torl_python": {"max_tool_calls": 0, "template": "chat"},
    "environment": {"environment": "guess_number"},
}
WITH_ANSWERS = {"tool_agent", "environment"}


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Record each prompt and delta of the run, and whether the event loop had to wait for it."""
    found: list[tuple[str, bool]] = []
    for name in ("prompt", "delta"):
        method = getattr(ChatTemplate, name)

        def call(*args: Any, _name: str = name, _method: Any = method, **keywords: Any) -> Any:
            found.append((_name, asyncio._get_running_loop() is not None))  # `get_running_loop` raises without one
            return _method(*args, **keywords)

        monkeypatch.setattr(ChatTemplate, name, call)
    return found


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("agent", AGENTS)
def test_every_agent_encodes_long_texts_beside_the_loop(
    agent: str, encodings: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both for prompts and for what tools and environments answer; the records do not depend on it."""
    monkeypatch.syspath_prepend(str(write_site(tmp_path)))
    monkeypatch.delitem(sys.modules, "turnwise_matrix", raising=False)
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, config_of([]) | {"agent": {"name": agent, **AGENTS[agent]}})
    records = []
    for num_chars, on_loop in ((messages.LONG_CHARS, True), (1, False)):
        monkeypatch.setattr(messages, "LONG_CHARS", num_chars)
        out = f"out-{num_chars}"

        code, errors = command("rollout", config, "--out", out)
        assert code == 0, errors

        # Others, without a loop, are those of the checks before the first episode.
        assert on_loop == (("prompt", True) in encodings)
        assert (on_loop and agent in WITH_ANSWERS) == (("delta", True) in encodings)
        encodings.clear()
        results = read_results(tmp_path / out)
        records.append(sorted(str([t.to_dict() for t in each.trajectories]) for each in results))
    assert records[0] == records[1]
