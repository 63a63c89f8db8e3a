"""
Installs the agents of this folder, and runs or trains one of them in one command.

    python examples/external_agents/run.py install langgraph
    python examples/external_agents/run.py rollout langgraph --out runs/langgraph data.limit=4
    python examples/external_agents/run.py train langgraph --out runs/train_langgraph
    python examples/external_agents/run.py eval langgraph --out runs/eval_langgraph

Further arguments are those of `turnwise rollout`, `train` and `eval`. A rollout starts the agent's program for each
episode. Training and evaluation have thousands of episodes, so there one process leases them, many at once. The
commands that this script runs are printed.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "external_openai"
PYTHON_AGENTS = ("openai", "langgraph", "openai_agents", "pydantic_ai", "anthropic")
AGENTS = (*PYTHON_AGENTS, "javascript")


def python_of(agent: str) -> Path:
    """Return the interpreter of an agent's virtual environment."""
    return HERE / f".venv-{agent}/bin/python"


def is_installed(agent: str) -> bool:
    """Return whether an agent's packages are there."""
    if agent in PYTHON_AGENTS:
        return python_of(agent).exists()
    return (HERE / "javascript/node_modules/openai").exists()


def install(agent: str) -> int:
    """Install the packages of an agent in a folder that no other one uses."""
    if agent in PYTHON_AGENTS:
        folder = python_of(agent).parents[1]
        venv.create(folder, clear=True, with_pip=True)
        requirements = HERE / f"requirements/{agent}.txt"
        return run([python_of(agent), "-m", "pip", "install", "--quiet", "-r", requirements])
    return run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", HERE / "javascript"])


def program(agent: str) -> list[str | Path]:
    """Return the command of an agent's program, for one episode."""
    if agent in PYTHON_AGENTS:
        return [python_of(agent), HERE / f"{agent}_agent.py"]
    return ["node", HERE / "javascript/agent.mjs"]


def worker(agent: str, control_file: Path) -> list[str | Path]:
    """Return the command of the process that leases episodes for an agent."""
    if agent in PYTHON_AGENTS:
        url = "anthropic_base_url" if agent == "anthropic" else "openai_base_url"
        return [python_of(agent), HERE / "worker.py", control_file, HERE / f"{agent}_agent.py", url]
    return ["node", HERE / "javascript/worker.mjs", control_file]


def turnwise(command: str, config: str, *arguments: str) -> list[str | Path]:
    """Return a command of turnwise with a config of `examples/external_openai`."""
    return [sys.executable, "-m", "turnwise.cli", command, CONFIGS / config, *arguments]


def rollout_overrides(agent: str) -> list[str]:
    """Return the overrides of `rollout.yaml` with which the program of an agent is started for each episode."""
    words = ", ".join(f"'{word}'" for word in program(agent))
    return [f"agent.command=[{words}]"]


def pull_overrides(control_file: Path) -> list[str]:
    """Return the overrides of `train.yaml` with which the episodes wait until a worker leases them."""
    return [f"agent={{name: task_pool, control_file: '{control_file}'}}"]


def run_with_worker(command: str, agent: str, arguments: list[str]) -> int:
    """Train or evaluate while one process of the agent leases the episodes."""
    with tempfile.TemporaryDirectory() as folder:
        control_file = Path(folder) / "control.json"
        # In a separate session: Ctrl-C ends the training, which still needs its agents to end well.
        leasing = start(worker(agent, control_file), start_new_session=True)
        try:
            return run(turnwise(command, "train.yaml", *pull_overrides(control_file), *arguments), leasing)
        finally:
            leasing.terminate()
            leasing.wait()


def run(command: list[str | Path], needed: subprocess.Popen[bytes] | None = None) -> int:
    """
    Run a command and return its exit code.

    Ctrl-C and SIGTERM reach the command, which then saves its state and ends. So does the end of the process `needed`:
    without agents, a training would wait.
    """
    # A handler and not SIG_IGN, which the command would inherit: a terminal sends Ctrl-C to the command as well.
    signal.signal(signal.SIGINT, lambda *_: None)
    process = start(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            if needed is not None and needed.poll() is not None:
                print(f"the agents ended with exit code {needed.returncode}", file=sys.stderr)
                process.terminate()
                needed = None


def start(command: list[str | Path], *, start_new_session: bool = False) -> subprocess.Popen[bytes]:
    """Print and start a command; the script ends with one line if its program is missing."""
    words = [str(word) for word in command]
    print("+", shlex.join(words), file=sys.stderr, flush=True)
    try:
        return subprocess.Popen(words, start_new_session=start_new_session)
    except FileNotFoundError:
        sys.exit(f"{words[0]} is not installed")


def main() -> int:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=("install", "rollout", "train", "eval"))
    parser.add_argument("agent", choices=AGENTS)
    options, arguments = parser.parse_known_args()
    if options.command == "install":
        return install(options.agent)
    if not is_installed(options.agent):
        parser.error(f"{options.agent} is not installed: run.py install {options.agent}")
    if options.command == "rollout":
        return run(turnwise("rollout", "rollout.yaml", *rollout_overrides(options.agent), *arguments))
    return run_with_worker(options.command, options.agent, arguments)


if __name__ == "__main__":
    sys.exit(main())
