"""
Calls all endpoints of a session, each in a new connection: `call_all.py FOLDER`.

It reads the variables of the session's program from the file `variables` of the folder, and writes status and answer of
each endpoint to the file `answers`.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

MESSAGES = [{"role": "user", "content": "Question 5?"}]
TOOLS = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
BODIES = {
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": {"model": "m", "messages": MESSAGES},
    "/v1/responses": {"model": "m", "input": "Question 5?"},
    "/v1/models": None,
    "/mcp": TOOLS,
}


def call(variables, path, body):
    """Return status and answer of an endpoint."""
    headers = {"Authorization": f"Bearer {variables['ANTHROPIC_AUTH_TOKEN']}", "Content-Type": "application/json"}
    headers["Accept"] = "application/json, text/event-stream"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(variables["ANTHROPIC_BASE_URL"] + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def write(path, value):
    """Write a JSON file, which no reader sees before it is whole."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


def call_all(folder):
    """Call the endpoints with the key in a folder, and write their answers there."""
    variables = json.loads((folder / "variables").read_text())
    write(folder / "answers", {path: call(variables, path, body) for path, body in BODIES.items()})


if __name__ == "__main__":
    call_all(Path(sys.argv[1]))
    os._exit(0)
