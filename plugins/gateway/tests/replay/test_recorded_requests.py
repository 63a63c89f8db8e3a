"""Requests in each dialect give the records that they gave before the last large refactoring, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gateway_processes import run_turnwise, write_run

from turnwise_gateway.replay.request_file import read_requests

RECORDED = Path(__file__).with_name("recorded")
DIALECTS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
"""Each file has turns with tools, a stream, and a result of a tool; `chat` has a branch too. Written at 20af32e."""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_file_has_its_dialect(dialect: str) -> None:
    """Every call is of the dialect, and all are answered."""
    events = read_requests(RECORDED / f"{dialect}.jsonl").events

    calls = [event for event in events if event["event"] == "call"]
    assert {DIALECTS[dialect]} == {event["path"] for event in calls}
    assert 5 <= len(calls) == sum(event["event"] == "delivered" for event in events)


@pytest.mark.slow
def test_records_are_as_recorded(tmp_path: Path) -> None:
    """Turns, records and lineage of a fresh gateway are equal to the recorded ones, id for id."""
    config = write_run(tmp_path)
    text = config.read_text().replace("max_calls: 5", "max_calls: 40").replace("engine:", "parser: hermes\nengine:")
    config.write_text(
        text.replace("prompt_length: 256, response_length: 512", "prompt_length: 512, response_length: 2048")
    )

    done = run_turnwise(tmp_path, "gateway", "replay", RECORDED, "--config", config, "--json")

    sessions = json.loads(done.stdout)["sessions"]
    assert [None] * len(DIALECTS) == [each["difference"] for each in sessions], done.stdout
    assert (0, [5, 5, 6]) == (done.returncode, sorted(each["num_calls"] for each in sessions))
