"""Every end of a session ends its calls of another server that does not answer."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from gateway_processes import Served, run_turnwise, serve, write_run
from hanging_server import HEAD, HangingServer

from turnwise import Status
from turnwise_result_files import read_results

pytestmark = pytest.mark.usefixtures("starts_a_process")
WAIT_S = 60


class Caller:
    """An agent that calls the judge in a thread, and keeps the status, the body and the error of the response."""

    def __init__(self, session: dict[str, Any]) -> None:
        place = urlsplit(session["openai_base_url"])
        self.connection = http.client.HTTPConnection(place.hostname, place.port, timeout=600)
        self.path, self.key = f"{place.path}/chat/completions", session["api_key"]
        self.status, self.body, self.error = 0, b"", ""
        self.began = threading.Event()
        self.thread = threading.Thread(target=self._call, daemon=True)
        self.thread.start()

    def _call(self) -> None:
        body = json.dumps({"model": "judge", "messages": [{"role": "user", "content": "Is it right?"}]})
        try:
            self.connection.request("POST", self.path, body, {"Authorization": f"Bearer {self.key}"})
            response = self.connection.getresponse()
            self.status = response.status
            self.began.set()
            self.body = response.read()
        except http.client.IncompleteRead as error:
            self.error, self.body = "half a response", error.partial
        except (OSError, http.client.HTTPException, AttributeError) as error:
            self.error = repr(error)

    def join(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.connection.close()

    def leave(self) -> None:
        self.connection.sock.shutdown(2)


def delete(served: Served, session: dict[str, Any], _caller: Caller) -> None:
    served.control("DELETE", f"/sessions/{session['id']}")


def fail(served: Served, session: dict[str, Any], _caller: Caller) -> None:
    served.control("POST", f"/sessions/{session['id']}/fail", {"reason": "it gave up"})


def leave(_served: Served, _session: dict[str, Any], caller: Caller) -> None:
    caller.leave()


def interrupt(served: Served, _session: dict[str, Any], _caller: Caller) -> None:
    served.stop()


def wait_for_limit(_served: Served, _session: dict[str, Any], _caller: Caller) -> None:
    """The option `session_s` ends the session."""


End = Callable[[Served, dict[str, Any], Caller], None]


@pytest.mark.slow
@pytest.mark.many_cases(2)
@pytest.mark.parametrize(
    ("end", "response"),
    [
        pytest.param(delete, b"", id="deleted"),
        pytest.param(interrupt, b"", id="interrupted"),
        pytest.param(delete, HEAD, id="deleted in a stream"),
        pytest.param(fail, HEAD, id="failed in a stream"),
        pytest.param(leave, b"", id="left"),
        pytest.param(wait_for_limit, b"", id="limited"),
    ],
)
def test_an_end_ends_calls_of_other_servers(tmp_path: Path, end: End, response: bytes) -> None:
    """At once: the other server sees its client leave, the agent reads no whole response, and the call is kept."""
    with HangingServer(response) as judge:
        models = json.dumps({"judge": {"base_url": judge.url, "timeout_s": 3600}})
        limit = 3 if end is wait_for_limit else 3600
        options = (f"agent.models={models}", f"agent.session_s={limit}", "--keep-requests", "--out", tmp_path / "out")
        with serve(tmp_path, write_run(tmp_path), *options) as served:
            session = served.open(uid="t1")
            caller = Caller(session)
            assert judge.asked.wait(WAIT_S)
            assert not response or caller.began.wait(WAIT_S)
            ending = threading.Thread(target=end, args=(served, session, caller), daemon=True)
            ending.start()
            assert judge.left.wait(WAIT_S)
            ending.join(WAIT_S)
            assert not ending.is_alive()
            if end in (leave, fail):  # `fail` does not wait for the result, which an interrupt would cut off
                delete(served, session, caller)
            if end is not interrupt:
                assert 0 == served.stop()[0]
    caller.join()

    assert caller.error or caller.status >= 400
    if end is interrupt:  # a session without a turn leaves nothing
        return
    (result,) = read_results(tmp_path / "out")
    (call,) = result.outside_calls
    assert ("judge", 200 if response else 0, "data: half" if response else "") == (
        call.model,
        call.status,
        call.response,
    )
    assert 1 == result.metrics.extra["gateway/forwarded_calls"]
    if end is wait_for_limit:
        assert Status.TIMED_OUT is result.status
    (file,) = (tmp_path / "out/requests").iterdir()
    assert 1 == sum('"event": "forwarded"' in line for line in file.read_text().splitlines())
    assert 0 == run_turnwise(tmp_path, "gateway", "replay", tmp_path / "out").returncode
