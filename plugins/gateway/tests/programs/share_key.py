"""
A program whose key is used by the process that its second argument names: `share_key.py FOLDER CALLER`.

The program of task 0 puts its variables into the folder, and ends when the file `answers` is there. Processes of it, or
of the program of task 1, or of the test call all endpoints in the meantime.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from call_all import BODIES, call, call_all, write

CALL_ALL = [sys.executable, str(Path(__file__).parent / "call_all.py")]
CHAT = "/v1/chat/completions"


def wait_for(path):
    """Wait until a file is there."""
    while not path.exists():
        time.sleep(0.01)


def start(caller, folder):
    """Let a process with this relation to the program call all endpoints."""
    command = [*CALL_ALL, str(folder)]
    if caller == "own":
        call_all(folder)
    elif caller == "child":
        subprocess.run(command, check=True)
    elif caller == "grandchild":
        subprocess.run(["sh", "-c", 'sh -c "$@"; true', "sh", '"$0" "$@"; true', *command], check=True)
    elif caller == "child without environment":
        subprocess.run(command, check=True, env={}, start_new_session=True)
    elif caller == "orphan":  # the shell ends at once, and nobody waits for its child
        subprocess.run(["sh", "-c", '"$@" & exit', "sh", *command], check=True, env={})
    elif caller == "daemon":
        code = "import os, subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True); os._exit(0)"
        subprocess.run([sys.executable, "-c", code, *command], check=True)


folder, caller = Path(sys.argv[1]), sys.argv[2]
variables = {name: os.environ[name] for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "TURNWISE_AGENT")}
messages = json.loads(os.environ["TURNWISE_TASK"])["messages"]
assert call(variables, CHAT, {**BODIES[CHAT], "messages": messages})[0] == 200
if "0" in messages[-1]["content"]:
    write(folder / "variables", variables)
    start(caller, folder)
    if caller != "program after the end":
        wait_for(folder / "answers")
        assert (
            call(variables, CHAT, {**BODIES[CHAT], "messages": [{"role": "user", "content": "Question 7?"}]})[0] == 200
        )
elif caller == "sibling":
    wait_for(folder / "variables")
    call_all(folder)
elif caller == "child of a sibling with the mark":
    wait_for(folder / "variables")
    mark = json.loads((folder / "variables").read_text())["TURNWISE_AGENT"]
    subprocess.run([*CALL_ALL, str(folder)], check=True, env={**os.environ, "TURNWISE_AGENT": mark})
elif caller == "program after the end":
    wait_for(folder / "ended")
    call_all(folder)
print("TURNWISE_SCORE=1.0")
