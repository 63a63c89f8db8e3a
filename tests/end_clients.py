"""A client of `turnwise gateway serve` for the matrix of ends: two sessions, and then the end of the command."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

REPLY_S = 60.0


def mark_of(file: Path) -> tuple[int, int] | None:
    """Return what tells a file from one of the same name that was written later; None if there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def talk(process: subprocess.Popen[str], control: Path, old: tuple[int, int] | None, *, stops: bool) -> None:
    """
    Have two sessions with a gateway, once it listens, as far as it lets them.

    Args:
        process: of the gateway.
        control: the file that announces it.
        old: mark of the file that an earlier gateway has left.
        stops: end the gateway by a signal after the sessions; otherwise it is known to end by itself.
    """
    pause = threading.Event()
    while mark_of(control) in (None, old):
        if process.poll() is not None or pause.wait(0.05):
            return
    # Requests fail where the gateway ends between them, which is what the cell is about.
    with suppress(OSError, ValueError, KeyError):
        access = json.loads(control.read_text())
        for num_turns in (2, 1):
            session = _request("POST", f"{access['url']}/sessions", {}, access["secret"])["session"]
            messages: list[dict[str, Any]] = []
            for _ in range(num_turns):
                messages.append({"role": "user", "content": "Hello?"})
                body = {"model": session["model"], "messages": messages}
                url = f"{session['openai_base_url']}/chat/completions"
                messages.append(_request("POST", url, body, session["api_key"])["choices"][0]["message"])
            _request("DELETE", f"{access['url']}/sessions/{session['id']}", None, access["secret"])
    if stops and process.poll() is None:
        process.send_signal(signal.SIGTERM)


def _request(method: str, url: str, body: object, key: str) -> Any:
    sent = urllib.request.Request(
        url,
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(sent, timeout=REPLY_S) as response:
        return json.loads(response.read())
