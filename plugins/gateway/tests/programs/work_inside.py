"""An agent with nothing but Python, for a workspace; its arguments say what it does there."""

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request


def post(url, body, key=None):
    """Return the status of a request, and the JSON of the response."""
    key = os.environ["OPENAI_API_KEY"] if key is None else key
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(text, key=None, **more):
    """Return the status of a call of the model, and its response."""
    body = {"model": os.environ["TURNWISE_MODEL"], "messages": [{"role": "user", "content": text}], **more}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)


def converse():
    """Hold two turns of the task's conversation, and print a score at the end of a long output."""
    messages = json.loads(os.environ["TURNWISE_TASK"])["messages"]
    for _ in range(2):
        body = {"model": os.environ["TURNWISE_MODEL"], "messages": messages}
        status, answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
        assert status == 200, answer
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    for _ in range(3000):
        print("x" * 1000)
    print("TURNWISE_SCORE=0.5")


def use_tools():
    """Write a file by a tool of the run, and find it here; tell the model what is there."""
    call = {"name": "shell", "arguments": {"command": "echo from the tool > seen; pwd"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    _, answer = post(os.environ["TURNWISE_MCP_URL"], message)
    with open("seen", encoding="utf-8") as file:
        ask(f"{answer['result']['content'][0]['text']} {file.read().strip()}")


def show_variables():
    """Tell the model the names of all variables."""
    ask(" ".join(sorted(os.environ)))


def escape(*addresses):
    """Tell the model what can be reached: addresses, and the session with a wrong key."""
    reached = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), 2).close()
            reached.append(address)
        except OSError:
            pass
    status, _ = ask("Hello?", key="guessed")
    ask(f"reached {reached} guess {status}")


def fail():
    """End with an exit code."""
    ask("Hello?")
    print("a reason", file=sys.stderr)
    sys.exit(3)


def hang():
    """Call the model, leave a process behind in another session, and wait."""
    ask("Hello?")
    if os.fork() == 0:
        os.setsid()
    time.sleep(98765)


def leave():
    """End, and leave a process behind that calls the model once more when it can."""
    ask("Hello?")
    if os.fork() == 0:
        os.setsid()
        time.sleep(98765)


def grow():
    """Call the model, and use more memory than there is."""
    ask("Hello?")
    held = [bytearray(2**20) for _ in range(4096)]
    print(len(held))


globals()[sys.argv[1]](*sys.argv[2:])
