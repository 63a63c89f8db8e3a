"""
A server of the tests that never becomes usable: `hostile_server.py WAY...`, with some of these ways.

`deaf` ignores the end of its input and the signals that it may ignore, `mute` closes its output, `flood` writes lines
to it, `long` one line without an end, `stderr` writes lines to standard error, `child` leaves a process behind that
holds its pipes, in a session apart, `pages` lists tools without an end, and `slow` never lists them. The ids of its
processes are in the file PIDS.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

ways = sys.argv[1:]
if "deaf" in ways:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
pids = [os.getpid()]
if "child" in ways:
    pids.append(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
Path(os.environ["PIDS"]).write_text(json.dumps(pids))
if "mute" in ways:
    os.close(1)


def write_forever(descriptor, data):
    """Write until the other end is closed, and wait forever then if deaf."""
    try:
        while True:
            os.write(descriptor, data)
    except OSError:
        return


def send(message):
    """Send a message of the protocol."""
    os.write(1, (json.dumps({"jsonrpc": "2.0", **message}) + "\n").encode())


def answer(message):
    """Answer the requests before the list of tools."""
    if message.get("method") == "initialize":
        info = {"name": "hostile", "version": "1"}
        result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        send({"id": message["id"], "result": {**result, "serverInfo": info}})
    elif message.get("method") == "tools/list" and "pages" in ways:
        tool = {"name": f"t{next(numbers)}", "inputSchema": {"type": "object"}}
        send({"id": message["id"], "result": {"tools": [tool], "nextCursor": tool["name"]}})
    elif "id" in message and message.get("method") != "tools/list":
        send({"id": message["id"], "error": {"code": -32601, "message": "no such method"}})


numbers = itertools.count()
if "flood" in ways:
    threading.Thread(target=write_forever, args=(1, b"no message\n" * 1000), daemon=True).start()
if "long" in ways:
    threading.Thread(target=write_forever, args=(1, b"x" * 65536), daemon=True).start()
if "stderr" in ways:
    threading.Thread(target=write_forever, args=(2, b"an error\n" * 1000), daemon=True).start()
for line in sys.stdin:
    if {"pages", "slow"} & {*ways}:
        answer(json.loads(line))
if "deaf" in ways:
    threading.Event().wait()
