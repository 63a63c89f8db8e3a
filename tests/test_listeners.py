"""All sockets on which a whole run listens: ours are on loopback, and Ray's refuse whoever lacks the token."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
from ray_runs import wait_until

HERE = Path(__file__).parent
ROOT = HERE.parent

LOCAL = """
model: {path: "package:turnwise_calculator_demo"}
data: {path: CALCULATOR}
engine: {name: transformers}
agent: {name: tool_agent}
parser: hermes
modules: [leaking_tools]
tools: [{name: "leaking_tools:calculator", run_in: process}]
reward: exact_match
observers: [{name: prometheus, port: 0}]
rollout: {n: 4, prompt_length: 256, response_length: 256, sampling: {temperature: 1.0}}
"""

ON_A_CLUSTER = """
import sys
from ray_judge_blueprint import BlockingReward
from ray_runs import PLAN, make_tasks
from test_ray_weights import TRANSPORTS, BigramBlueprint, weights_of
from turnwise.config.runtime import RuntimeConfig
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.remote.weight_updates import WeightUpdater

class Blueprint(BigramBlueprint):
    def make_reward(self, judge=None):
        return BlockingReward()

config = RuntimeConfig(name="ray", num_workers=2, num_replicas=2, reward_workers=1)
weights = GroupWeights(WeightUpdater(TRANSPORTS["gloo"](), "gloo"))
with RolloutManager(RayRuntime(Blueprint(transport="gloo"), config, weights=weights), PLAN) as manager:
    manager.update_weights(weights_of(1))
    assert len(manager.rollout(make_tasks(4))) == 4
    print("running", flush=True)
    sys.stdin.read()
"""

ALL_ADDRESSES = ("::", "0.0.0.0")
ACTORS = ("ray::WorkerActor", "ray::ReplicaActor", "ray::RewardActor")
PROTECTED = (
    "CoreWorkerService/NumPendingTasks",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/FreeObjects",
    "ObjectManagerService/Pull",
    "ObjectManagerService/Push",
    "InternalKVGcsService/InternalKVKeys",
)
"""One method of each of Ray's services; a server answers UNIMPLEMENTED for those of the others."""

STRANGER = """
import json, sys
import grpc

codes = {}
for target in json.loads(sys.argv[1]):
    channel = grpc.insecure_channel(target)
    codes[target] = []
    for method in json.loads(sys.argv[2]):
        try:
            channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=600)
            codes[target].append("OK")
        except grpc.RpcError as error:
            codes[target].append(error.code().name)
print(json.dumps(codes))
"""


def listeners(pid):
    """Return the addresses on which a process and its descendants listen, with the command line of each."""
    found = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    found[each.laddr.ip, each.laddr.port] = line
    return found


@contextmanager
def started(command, **environment):
    """A process that is killed afterwards, with its descendants."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    try:
        yield process
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.communicate()


@pytest.mark.slow
def test_a_local_run_listens_on_loopback_alone(tmp_path):
    """The metrics listen, and neither the engine nor the processes of tools do."""
    config, pids = tmp_path / "config.yaml", tmp_path / "pids"
    pids.mkdir()
    config.write_text(LOCAL.replace("CALCULATOR", str(ROOT / "examples" / "calculator.jsonl")))
    command = ["-m", "turnwise.cli", "rollout", str(config), "--out", str(tmp_path / "out")]
    with started(command, TURNWISE_TEST_PIDS=str(pids)) as run:
        wait_until(lambda: run.poll() is not None or len(list(pids.iterdir())) >= 8, "no tool runs")
        assert run.poll() is None, run.communicate()
        found = listeners(run.pid)
        run.send_signal(signal.SIGKILL)

    assert [ip for ip, _port in found] == ["127.0.0.1"]


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_on_ray_listens_behind_the_token():
    """Actors and the driver open no other sockets than Ray's and the replicas' channels, and all refuse a stranger."""
    pytest.importorskip("grpc")
    with started(["-c", ON_A_CLUSTER]) as run, tempfile.TemporaryDirectory() as home:
        output = []
        for line in run.stdout:
            output.append(line)
            if line.strip() == "running":
                break
        assert run.poll() is None, "".join(output)
        everywhere = listeners(run.pid)
        # Ray's own sockets of a replica listen on all addresses, its channels on the address of the node.
        channels = [place for place, line in everywhere.items() if is_replica(line) and place[0] not in ALL_ADDRESSES]
        rests = [rest_of_a_false_proof(place) for place in channels]
        found = {
            place: line
            for place, line in everywhere.items()
            if not ip_address(place[0]).is_loopback and place not in channels
        }
        # The metrics of Ray's autoscaler are open to everyone.
        exposed = {place: line for place, line in found.items() if "autoscaler" not in line}
        over_http = {place for place, line in exposed.items() if "Agent" in line}
        targets = [format_target(*place) for place in exposed.keys() - over_http]
        stranger = subprocess.run(
            [sys.executable, "-c", STRANGER, json.dumps(targets), json.dumps(PROTECTED)],
            env={"PATH": os.environ["PATH"], "HOME": home},
            capture_output=True,
            text=True,
            check=True,
        )
        http = {place: http_status(*place) for place in over_http}
        actors = [line for line in exposed.values() if line.startswith(ACTORS)]

    assert [b"", b""] == rests  # of the policy's replica and of the judge's
    codes = json.loads(stranger.stdout)
    assert len(actors) == 5, exposed  # one socket each, Ray's own
    answers = {target: set(found) for target, found in codes.items()}
    assert answers == {target: {"UNAUTHENTICATED", "UNIMPLEMENTED"} for target in targets}, exposed
    assert set(http.values()) <= {401, 403}, http


def is_replica(line):
    """Return whether a process is a replica."""
    return line.startswith("ray::ReplicaActor")


def rest_of_a_false_proof(place):
    """Return the bytes that a channel still sends to a client that does not know its key; none if it hangs up."""
    with socket.create_connection(place, timeout=600) as client:
        client.sendall(bytes(32))
        answer = b""
        while len(answer) < 64:
            answer += client.recv(64)
        client.sendall(bytes(32))
        return client.recv(1)


def format_target(ip, port):
    """Return host and port for a client on this machine."""
    return f"127.0.0.1:{port}" if ip in ALL_ADDRESSES else f"{ip}:{port}"


def http_status(ip, port):
    """Return the status of a request without a token."""
    try:
        with urllib.request.urlopen(f"http://{format_target(ip, port)}/", timeout=600) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
