"""A program that makes calls with secrets in many places, and ends in the way that its task says."""

import json
import os
import signal
import sys
import urllib.error
import urllib.request

KEY = os.environ["OPENAI_API_KEY"]
MORE = json.loads(os.environ["MORE_HEADERS"])


def call(body, path="chat/completions", key=KEY):
    """Send a request with the key and further secrets in its headers; return its status."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **MORE},
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def call_in_all_ways():
    """Call the policy, another server, one that is not there and one that refuses; be refused; call a tool."""
    messages = [{"role": "user", "content": "Hello?"}]
    found = [call({"model": model, "messages": messages}) for model in ("m", "judge", "nowhere", "refusing")]
    found.append(call({"model": "m", "messages": messages, "n": 3}))
    found.append(call({"model": "m", "messages": messages}, f"chat/completions?api_key={KEY}"))
    found.append(call({"model": "m", "messages": messages}, key=f"{KEY}x"))
    assert [200, 200, 502, 401, 400, 200, 401] == found, found


if __name__ == "__main__":
    with open(os.environ["KEYS_FILE"], "a", encoding="utf-8") as file:
        file.write(KEY + "\n")
    call_in_all_ways()
    ending = json.loads(os.environ["TURNWISE_TASK"])["uid"]
    if ending == "task-1":
        raise RuntimeError("the agent broke")
    if ending == "task-2":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "task-3":
        os._exit(7 if call({"model": "m", "messages": [{"role": "oops"}]}) == 400 else 8)
    sys.stdout.write("TURNWISE_SCORE=0.5\n")
