"""
An agent that leases episodes for ever; the number at the end of a task's uid is its score.

Writes a line for each lease, and each status of its news, to a file. With a number and a file as further arguments, it
keeps every lease after so many as it is until the file exists.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

CONTROL, LOG = Path(sys.argv[1]), Path(sys.argv[2])
FREE, GO = (int(sys.argv[3]), Path(sys.argv[4])) if len(sys.argv) > 3 else (0, Path("/"))
LEASES = []
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def send(url, key, body):
    """Return status and content of a reply."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as reply:
            return reply.status, json.loads(reply.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, {}


def tell(path, **body):
    """Send a request to the control port; read its address anew, because it may have changed."""
    access = json.loads(CONTROL.read_text())
    return send(access["url"] + path, access["secret"], body)


def note(**line):
    with LOG.open("a") as log:
        log.write(json.dumps(line) + "\n")


def work(leased):
    """Converse until the model calls no tool; return whether it answered every call."""
    session, messages = leased["session"], leased["task"]["messages"]
    while True:
        body = {"model": session["model"], "messages": messages, "tools": TOOLS}
        status, reply = send(f"{session['openai_base_url']}/chat/completions", session["api_key"], body)
        if status != 200:
            return False
        message = reply["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return True
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "2"})


def run_one():
    status, leased = tell("/tasks/lease", worker=LOG.name, wait_s=2)
    if status != 200:
        return
    lease, uid = leased["lease"], leased["task"]["uid"]
    note(uid=uid, lease=lease["id"], fence=lease["fence"], url=leased["session"]["openai_base_url"])
    LEASES.append(lease["id"])
    while len(LEASES) > FREE and not GO.exists():
        time.sleep(0.02)
    if work(leased):
        score = int("".join(character for character in uid if character.isdigit()))
        while (status := tell(f"/leases/{lease['id']}/complete", fence=lease["fence"], score=score)[0]) == 429:
            time.sleep(0.1)  # the worker of the episode could not be reached
        note(uid=uid, lease=lease["id"], status=status)


while True:
    try:
        run_one()
    except (OSError, ValueError):  # nobody listens, or a worker has died: the next lease says which
        time.sleep(0.02)
