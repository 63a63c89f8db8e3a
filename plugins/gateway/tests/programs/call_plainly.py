"""A program with the standard library alone; its first argument names how it behaves after a call of the model."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request


def call(text="Question 0?"):
    """Call the model once and return its message."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


behaviour = sys.argv[1]
call()
if behaviour == "score":
    print("starting\nTURNWISE_SCORE=0.75", flush=True)
elif behaviour == "report":
    print(f"TURNWISE_SCORE={sys.argv[2]}", flush=True)
elif behaviour == "environment":
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(dict(os.environ), file)
elif behaviour == "exit":
    print("the last line", file=sys.stderr)
    sys.exit(3)
elif behaviour == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "child":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(str(child.pid))
elif behaviour == "detached":
    # A child that has left the group keeps the pipes, and goes on to call.
    child = subprocess.Popen([sys.executable, __file__, "runaway"], start_new_session=True)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(str(child.pid))
elif behaviour == "silence":
    time.sleep(600)
elif behaviour == "runaway":
    while True:
        try:
            call(f"Question {time.monotonic_ns()}?")
        except OSError:
            time.sleep(0.01)
