"""`turnwise plan`: its table, its JSON and its errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from turnwise import PoolPlacement, RunPlacement
from turnwise.cli import main
from turnwise_commands.plan_report import count_gpu_nodes, find_largest_bundle
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import environment_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config_file(tmp_path):
    """A config with its plugin, so that it resolves in any environment."""
    site = tmp_path / "site"
    install_plugin(site, "acme_plan", PLUGIN)
    file = tmp_path / "run.yaml"
    engine = {"name": "acme", "tensor_parallel_size": 2}
    config = {"data": {"path": "none.jsonl"}, "agent": "acme", "engine": engine, "plugins": ["acme_plan"]}
    file.write_text(yaml.safe_dump({**config, "runtime": {"name": "ray", "total_devices": 4}}))
    return file


PLUGIN = """
import turnwise
from attrs import frozen


@frozen
class Config:
    tensor_parallel_size: int = 1


@turnwise.hookimpl
def register_engines(registry):
    registry.add("acme", lambda config, resources: None, config=Config)


@turnwise.hookimpl
def register_agents(registry):
    registry.add("acme", lambda config, resources: None)
"""

WITHOUT_RAY = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
sys.meta_path.insert(0, Refuse())
from turnwise.cli import main
code = main(sys.argv[1:])
assert "ray" not in sys.modules
sys.exit(code)
"""


def plan(config_file, *arguments):
    """Run `turnwise plan` in a process that has no Ray."""
    environment = {**environment_of(config_file.parent), "COLUMNS": "100"}
    command = [sys.executable, "-c", WITHOUT_RAY, "plan", str(config_file), "--placement-only", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_plan_prints_a_table_without_ray(config_file):
    """`turnwise plan` needs no Ray and starts nothing."""
    done = plan(
        config_file, "runtime.num_workers=3", "runtime.ray.replica_python=/opt/engine/bin/python", "memory.mode=hybrid"
    )

    assert (0, "") == (done.returncode, done.stderr)
    for text in ("2 replicas of acme", "tensor_parallel_size 2", "2 GPU (STRICT_PACK)", "/opt/engine/bin/python"):
        assert text in done.stdout
    assert "at least 1 with 8 GPU" in done.stdout
    assert "hybrid: engines sleep at level 1" in done.stdout


def test_plan_prints_json(config_file):
    """With --json the plan is one object."""
    done = plan(config_file, "judge.engine=acme", "--json")

    assert "" == done.stderr
    shown = json.loads(done.stdout)
    assert ["policy", "judge"] == [pool["name"] for pool in shown["pools"]]
    assert [{"GPU": 2.0}] == shown["pools"][0]["bundles"]
    assert {"GPU": 5.0} == shown["needs"]
    assert {"mode": "standalone", "level": None} == shown["memory"]


@pytest.mark.slow
def test_plan_prints_the_nodes_of_workers_and_replicas(config_file):
    """By their labels, with the resources of each worker, in the table and as JSON."""
    options = (
        "runtime.ray.worker_resources={num_cpus: 2, resources: {disk: 1}, labels: {pool: cpu}}",
        "runtime.ray.replica_resources={labels: {pool: gpu}}",
        "runtime.num_workers=3",
    )
    table, shown = plan(config_file, *options).stdout, json.loads(plan(config_file, *options, "--json").stdout)

    assert "3, 2 CPU + 1 disk each, on nodes with pool=cpu" in table
    assert "pool=gpu" in table
    assert {"count": 3, "resources_each": {"CPU": 2.0, "disk": 1.0}, "labels": {"pool": "cpu"}} == shown["workers"]
    assert {"pool": "gpu"} == shown["pools"][0]["labels"]
    assert {"GPU": 4.0, "CPU": 6.0, "disk": 3.0} == shown["needs"]


@pytest.mark.slow
def test_plan_prints_how_far_the_pool_grows(config_file):
    """And refuses a bound below the replicas that the devices make at the start."""
    grown = plan(config_file, "runtime.ray.max_replicas=4")
    fixed = json.loads(plan(config_file, "--json").stdout)
    refused = plan(config_file, "runtime.ray.max_replicas=1")

    assert "2 replicas of acme, up to 4 as the cluster has room" in grown.stdout
    assert None is fixed["pools"][0]["max_replicas"]
    assert 2 == refused.returncode
    assert "runtime.ray.max_replicas: 1 is less than the 2 replicas at the start" in refused.stderr


def test_plan_reports_an_error_in_one_line(config_file):
    """A config that cannot be placed exits with 2 and one line."""
    done = plan(config_file, "runtime.total_devices=5")

    assert (2, "") == (done.returncode, done.stdout)
    assert 1 == len(done.stderr.splitlines())
    assert "runtime.total_devices: 5 does not divide by the 2 devices of one replica" in done.stderr


WRONG = {
    "a missing file of tasks": (["data.path=none.jsonl"], "none.jsonl"),
    "an unknown agent of a row": (["data.path=other.jsonl"], "names the unknown agent 'nobody'"),
    "a model that is not there": (["model.path=./nothing"], "model.path: there is no directory"),
    "a tool twice": (["tools=[calculator, calculator]"], "calculator"),
    "a router that cannot be built": (["router=./own.py:Missing", "modules=[./own.py]", "runtime=ray"], "own.py"),
    "an engine of another program": (["engine=verl"], "engine verl works only inside verl"),
    "an engine of another program on Ray": (["engine=verl", "runtime=ray"], "engine verl works only inside verl"),
    "a missing interpreter": (["runtime=ray", "runtime.ray.replica_python=./no/python"], "is not an executable file"),
}
"""Overrides of a config that runs, each of which a rollout refuses before it starts an engine."""


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("case", WRONG)
def test_plan_refuses_what_a_rollout_refuses(case, tmp_path, capsys):
    """In one line, and `--placement-only` asks for no part."""
    text = (ROOT / "examples/calculator.yaml").read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    row = {"messages": [{"role": "user", "content": "x"}]}
    (tmp_path / "calculator.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (tmp_path / "other.jsonl").write_text(json.dumps({**row, "agent_name": "nobody"}), encoding="utf-8")
    (tmp_path / "own.py").touch()
    overrides, reason = WRONG[case]

    code = main(["plan", str(tmp_path / "run.yaml"), *overrides])

    printed = capsys.readouterr()
    assert (2, "") == (code, printed.out)
    (line,) = printed.err.splitlines()
    assert line.startswith("turnwise: error: ")
    assert reason in line
    assert 0 == main(["plan", str(tmp_path / "run.yaml"), *overrides, "--placement-only"])


def test_plan_help_has_examples(capsys):
    """`--help` shows an example."""
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "turnwise plan run.yaml" in capsys.readouterr().out


@pytest.mark.slow
def test_plan_rejects_an_invalid_address(config_file):
    """`turnwise plan` exits with 2 after one line."""
    done = plan(config_file, "runtime.ray.address=nonsense")

    assert (2, "") == (done.returncode, done.stdout)
    assert 1 == len(done.stderr.splitlines())
    assert "runtime.ray.address: expected host:port, ray://host:port, auto or local, got 'nonsense'" in done.stderr


def test_pools_share_nodes_where_they_fit():
    """Two replicas with four devices fill a node of eight, so those with one device need a second node."""
    policy = PoolPlacement(num_replicas=2, bundles=({"GPU": 1.0},))
    judge = PoolPlacement(name="judge", num_replicas=2, bundles=({"GPU": 4.0},))
    placement = RunPlacement(runtime="ray", address=None, pools=(policy, judge), num_workers=1, devices_per_node=8)

    assert 2 == count_gpu_nodes(placement)
    assert {"GPU": 4.0} == find_largest_bundle(placement)


@pytest.mark.slow
@pytest.mark.parametrize("max_in_flight", [16, 1_000_000])
def test_open_files_of_many_programs(config_file, max_in_flight):
    """The plan compares the descriptors of a worker's programs with the limit of a process."""
    arguments = [
        sys.executable,
        "-m",
        "turnwise.cli",
        "plan",
        str(config_file),
        "--placement-only",
        f"rollout.max_in_flight={max_in_flight}",
    ]
    environment = environment_of(config_file.parent) | {"COLUMNS": "200"}
    shown = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout
    plan = json.loads(
        subprocess.run([*arguments, "--json"], env=environment, capture_output=True, text=True, check=True).stdout
    )

    assert plan["open_files"]["needed"] == 256 + 6 * max_in_flight
    assert plan["open_files"]["programs"] == (plan["open_files"]["limit"] - 256) // 6
    assert f"{256 + 6 * max_in_flight:,}" in shown
    assert (f"{plan['open_files']['programs']:,} of them fit" in shown) == (max_in_flight > 16)
    assert ("lower rollout.max_in_flight" in shown) == (max_in_flight > 16)
