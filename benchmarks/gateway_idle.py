"""
Runs many agents beside many idle connections, from a shell that gives 1,024 descriptors.

    python benchmarks/gateway_idle.py [--agents 1000] [--idle 2000] [--hard]

`turnwise rollout` starts under `ulimit -Sn 1024`, or with `--hard` under `ulimit -Hn 1024` too. Each agent is a small
program, which calls once at its start and once more when all that fit are there, at a random time within some seconds.
In the meantime this process keeps idle connections open to the port of the agents: it opens each one again a second
after it was ended. Its waits are those of the agents, from a connection to the last byte of the response.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from attrs import define, field
from measurement import describe_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "gateway" / "tests"))  # its run is a test's
from gateway_rollouts import write_rollout

from turnwise.descriptors import raise_descriptor_limit
from turnwise_result_files import read_results

SOFT = 1024
SPREAD_S = 20
POLL_S = 0.2
REOPEN_S = 1.0
LIMIT_S = 1200.0
# Bash alone: 1,000 processes of Python would need more memory than all that is measured.
AGENT = r"""
address=${OPENAI_BASE_URL#http://}; path=/${address#*/}; address=${address%%/*}
call() {
  local began=$EPOCHREALTIME status lines body
  body="{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"$1 $$\"}]}"
  exec 3<>"/dev/tcp/${address%:*}/${address#*:}" || exit 4
  printf 'POST %s/chat/completions HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nConnection: close\r\n' \
    "$path" "$address" "$OPENAI_API_KEY" >&3
  printf 'Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s' ${#body} "$body" >&3
  read -r -u 3 status; mapfile -u 3 lines; exec 3>&-
  [[ $status == *" 200 "* ]] || { echo "$status ${lines[-1]}" >&2; exit 5; }
  echo "$1 $began $EPOCHREALTIME" >>"$FOLDER/waits/$$"
}
call first
echo "$address" >"$FOLDER/here/$$"
exec 4<>"$FOLDER/fifo"
until [[ -e $FOLDER/go ]]; do read -r -t 1 -u 4; done
read -r -t "$((RANDOM % SPREAD)).$((RANDOM % 10))" -u 4
call second
"""


@define
class IdleConnections:
    """
    Connections on which nothing is sent.

    Attributes:
        seconds: after which each one was ended.
        num_open: that are open now.
    """

    seconds: list[float] = field(factory=list)
    num_open: int = 0

    async def keep(self, host: str, port: int) -> None:
        """Keep one connection open, until the server is gone."""
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port)
            except OSError:
                return
            began = time.monotonic()
            self.num_open += 1
            try:
                await reader.read()
            except OSError:
                pass
            finally:
                self.num_open -= 1
                self.seconds.append(time.monotonic() - began)
                writer.close()
            await asyncio.sleep(REOPEN_S)


@define
class Samples:
    """Descriptors and MiB of the driver, from time to time."""

    process: psutil.Process
    files: list[int] = field(factory=list)
    memory: list[float] = field(factory=list)

    def take(self) -> None:
        """Take one sample of the driver, unless it has ended."""
        try:
            files, memory = self.process.num_fds(), self.process.memory_info().rss / 2**20
        except psutil.Error:
            return
        if memory:  # else it has just ended
            self.files.append(files)
            self.memory.append(memory)


def start_run(folder: Path, num_agents: int, *, is_hard: bool) -> subprocess.Popen[bytes]:
    """Start the run under a limit of descriptors; its output is in the file `log`."""
    for name in ("waits", "here"):
        (folder / name).mkdir()
    os.mkfifo(folder / "fifo", stat.S_IRUSR | stat.S_IWUSR)
    environment = {"FOLDER": str(folder), "SPREAD": str(SPREAD_S)}
    agent = {"command": ["bash", "-c", AGENT], "environment": environment}
    write_rollout(folder, num_agents, agent, max_in_flight=num_agents)
    paths = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    limit = f'ulimit -{"" if is_hard else "S"}n {SOFT}; exec "$@"'
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", "--out", "out"]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            ["sh", "-c", limit, "sh", *command],
            cwd=folder,
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": paths},
        )


async def watch(run: subprocess.Popen[bytes], folder: Path, num_idle: int, num_at_once: int) -> tuple[Samples, Samples]:
    """Keep idle connections to a run until it ends; return samples before and after they are there, and print them."""
    before, during = (Samples(psutil.Process(run.pid)) for _ in range(2))
    idle, tasks = IdleConnections(), list[asyncio.Task[None]]()
    here = folder / "here"

    async def wait_for(condition: Callable[[], bool], samples: Samples) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition() and run.poll() is None:
            assert time.monotonic() < end, (folder / "log").read_text()[-3000:]
            samples.take()
            await asyncio.sleep(POLL_S)

    await wait_for(lambda: any(here.iterdir()), before)
    first = next(here.iterdir(), None)
    assert first is not None, (folder / "log").read_text()[-3000:]
    host, port = first.read_text().strip().split(":")
    async with asyncio.TaskGroup() as group:
        for _ in range(num_idle):
            tasks.append(group.create_task(idle.keep(host, int(port))))
        await wait_for(lambda: len(list(here.iterdir())) >= num_at_once, during)
        num_here, num_open = len(list(here.iterdir())), idle.num_open
        (folder / "go").touch()
        await wait_for(lambda: False, during)
        for task in tasks:
            task.cancel()
    print(f"agents at once {num_here}; idle connections open then {num_open} of {num_idle}")
    if idle.seconds:
        late = sorted(idle.seconds)
        middle = late[len(late) // 2]
        print(f"idle connections ended {len(late)}, after {middle:.1f} s (median), {late[-1]:.1f} s (longest)")
    return before, during


def main() -> None:
    """Run, and print the figures."""
    parser = argparse.ArgumentParser(description="Run agents beside idle connections with few descriptors.")
    parser.add_argument("--agents", type=int, default=1000, help="programs of one run")
    parser.add_argument("--idle", type=int, default=2000, help="idle connections")
    parser.add_argument("--at-once", type=int, help="programs that are waited for; all by default")
    parser.add_argument("--hard", action="store_true", help=f"the hard limit is {SOFT} too")
    arguments = parser.parse_args()
    print(describe_machine())
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        run = start_run(folder, arguments.agents, is_hard=arguments.hard)
        try:
            at_once = arguments.at_once or arguments.agents
            before, during = asyncio.run(watch(run, folder, arguments.idle, at_once))
        finally:
            run.kill()
            run.wait()
        results = read_results(folder / "out")
        statuses = sorted(each.status.value for each in results)
        print(f"exit code {run.returncode} after {time.monotonic() - began:.0f} s; episodes {len(results)}:", end=" ")
        print({status: statuses.count(status) for status in set(statuses)})
        print(f"descriptors of the driver: {max(during.files)} at most")
        print(f"memory of the driver: {before.memory[-1]:.0f} MiB at the first call, ", end="")
        print(f"{max(during.memory):.0f} at most, {during.memory[-1]:.0f} at the end")
        for call in ("first", "second"):
            print(f"longest wait of a {call} call: {longest_wait(folder, call):.2f} s")
        print((folder / "log").read_text()[-600:])


def longest_wait(folder: Path, call: str) -> float:
    """Return the longest wait of the agents for a call."""
    lines = [line.split() for file in (folder / "waits").iterdir() for line in file.read_text().splitlines()]
    return max(float(ended) - float(began) for name, began, ended in lines if name == call)


if __name__ == "__main__":
    main()
