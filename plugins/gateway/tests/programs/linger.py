"""
A program that calls the model, and then stays with a child process while a file is there.

With a third argument it closes all descriptors that it has inherited, and its child leaves its group.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

hold, pids = Path(sys.argv[1]), Path(sys.argv[2])
task = json.loads(os.environ["TURNWISE_TASK"])
request = urllib.request.Request(
    f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
    json.dumps({"model": "m", "messages": task["messages"]}).encode(),
    {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as response:
    json.load(response)
if hold.exists() and int(task["messages"][0]["content"].split()[-1]) >= 6:
    detaches = len(sys.argv) > 3
    if detaches:
        os.closerange(3, 1024)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=detaches)
    (pids / str(os.getpid())).touch()
    (pids / str(child.pid)).touch()
    time.sleep(600)
print("TURNWISE_SCORE=1.0", flush=True)
