"""
Kills processes of `turnwise rollout` at random times, resumes until the run is complete, and compares the results.

    python benchmarks/random_kills.py [--runs 200] [--episodes 400] [--minutes 60] [--runtime RUNTIME] [--seed 0]

Each run gets one to four SIGKILLs: of the driver, or on Ray of a worker, a replica, a reward worker or the GCS. When
the command ends early, `--resume` continues the run. In the end every episode must be there exactly once with the
tokens and the reward of an undisturbed run, and the batch and the metrics too. The script prints a line for each run
and the sums, stops after `--minutes`, and exits with 1 if anything is missing, duplicated or wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import psutil
import yaml
from measurement import describe_machine

from turnwise import EpisodeResult
from turnwise.batch.rollout_batch import RolloutBatch
from turnwise.errors import DataError
from turnwise_result_files import read_results
from turnwise_testing.installation import install_plugin
from turnwise_testing.tokenizers import byte_tokenizer

ROLES: Final = {
    "worker": "ray::WorkerActor",
    "replica": "ray::ReplicaActor",
    "reward worker": "ray::RewardActor",
    "gcs": "gcs_server",
}
PLUGIN: Final = Path(__file__).with_name("killed_parts.py")
MAX_PARTS: Final = 12
"""Parts of one run; more mean that resuming does not end."""


def main() -> int:
    """Run, print and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="runs in all (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=400, help="episodes of a run (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time (default: %(default)s)")
    parser.add_argument("--runtime", choices=("both", "local", "ray"), default="both", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the times and victims (default: %(default)s)")
    options = parser.parse_args()
    runtimes = ("local", "ray") if options.runtime == "both" else (options.runtime,)
    deadline = time.monotonic() + 60 * options.minutes
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), options.episodes)
        expected = {runtime: site.undisturbed(runtime) for runtime in runtimes}
        kills: Counter[str] = Counter()
        errors = num_runs = 0
        for number in range(options.runs):
            if time.monotonic() > deadline:
                print(f"stopped after {options.minutes:g} minutes")
                break
            runtime = runtimes[number % len(runtimes)]
            victims, error = site.killed_run(runtime, random.Random(f"{options.seed}/{number}"), *expected[runtime])
            num_runs, errors = num_runs + 1, errors + bool(error)
            kills.update(victims)
            print(
                f"{number:4} {runtime:5} killed: {', '.join(victims) or 'nothing'}: {error or 'complete'}", flush=True
            )
    killed = ", ".join(f"{role} {count}" for role, count in sorted(kills.items()))
    print(f"{num_runs} runs of {options.episodes} episodes; kills: {killed}; incomplete or wrong runs: {errors}")
    return 1 if errors else 0


class Site:
    """A folder with the plugin, a data set, and a config for each runtime."""

    def __init__(self, folder: Path, num_episodes: int) -> None:
        self.folder = folder
        self.num_episodes = num_episodes
        install_plugin(folder, "killed_parts", PLUGIN.read_text(encoding="utf-8"))
        byte_tokenizer().save_pretrained(folder / "model")
        rows = [{"messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(num_episodes)]
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        for runtime in ("local", "ray"):
            section = {"name": "ray", "num_workers": 2, "num_replicas": 2, "reward_workers": 1}
            section |= {"ray": {"heartbeat_s": 0.5, "heartbeat_timeout_s": 5.0, "backoff_s": 0.1, "max_restarts": 20}}
            config = {
                "model": {"path": "model"},
                "data": {"path": "data.jsonl"},
                "engine": "killed_scripted",
                "agent": "killed_two_turns",
                "reward": "killed_length",
                "rollout": {"prompt_length": 64, "response_length": 128},
                "runtime": section if runtime == "ray" else "local",
                "plugins": ["killed_parts"],
            }
            (folder / f"{runtime}.yaml").write_text(yaml.safe_dump(config))

    def undisturbed(self, runtime: str) -> tuple[dict[str, object], float]:
        """Return the episodes of a run without kills, and its seconds."""
        started = time.monotonic()
        out = self.folder / f"undisturbed-{runtime}"
        process = self.start(f"{runtime}.yaml", "--out", str(out))
        if process.wait() != 0:
            raise SystemExit(f"the undisturbed run failed:\n{(self.folder / 'log').read_text()[-3000:]}")
        return summary_of(read_results(out)), time.monotonic() - started

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `turnwise rollout` in the folder; its output goes to a log."""
        command = [sys.executable, "-m", "turnwise.cli", "rollout", *arguments]
        with (self.folder / "log").open("w") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=os.environ | {"PYTHONPATH": str(self.folder)}, stdout=log, stderr=log
            )

    def killed_run(
        self, runtime: str, chance: random.Random, expected: dict[str, object], seconds: float
    ) -> tuple[list[str], str]:
        """Return the victims of a run, and the first thing wrong with its results, or an empty string."""
        out = self.folder / f"{runtime}-{chance.random()}"
        roles = ["driver"] if runtime == "local" else ["driver", "driver", *ROLES]
        plan = [(chance.choice(roles), chance.uniform(0.1, 1.0) * seconds) for _ in range(chance.randint(1, 4))]
        victims: list[str] = []
        for _ in range(MAX_PARTS):
            resumed = (out / "config.resolved.yaml").exists()
            arguments = ("--resume", str(out), "--retry-failed") if resumed else (f"{runtime}.yaml", "--out", str(out))
            process = self.start(*arguments)
            while plan and process.poll() is None:
                role, delay = plan.pop()
                try:
                    process.wait(timeout=delay)
                except subprocess.TimeoutExpired:
                    victims += kill(process.pid, role, chance)
            code = process.wait()
            if code == 0 and not plan:
                break
        return victims, self.find_error(out, code, expected)

    def find_error(self, out: Path, code: int, expected: dict[str, object]) -> str:
        """Return the first thing wrong with the results of a run, or an empty string."""
        if code != 0:
            return f"the last part exited with {code}: {(self.folder / 'log').read_text()[-500:]}"
        try:
            results = read_results(out)
            rows = RolloutBatch.load(out / "batch.safetensors").rows
            counted = json.loads((out / "metrics.json").read_text())["episodes"]
        except (DataError, OSError) as error:
            return str(error)
        if not self.num_episodes == len(results) == len(rows) == counted:
            return f"{len(results)} episodes, {len(rows)} rows of the batch, {counted} in the metrics"
        return "" if summary_of(results) == expected else "tokens or rewards differ from the undisturbed run"


def summary_of(results: list[EpisodeResult]) -> dict[str, object]:
    """Return the reward and the ids of each episode by uid; an episode that is there twice counts once."""
    return {each.uid: (each.reward, each.trajectories[0].input_ids.tolist()) for each in results if each.trajectories}


def kill(driver: int, role: str, chance: random.Random) -> list[str]:
    """Kill the driver, or one of its processes in a role; return the role if there was one."""
    try:
        parent = psutil.Process(driver)
        processes = [parent] if role == "driver" else [p for p in parent.children(recursive=True) if _is(p, role)]
        if not processes:
            return []
        chance.choice(processes).kill()
    except psutil.NoSuchProcess:
        return []
    return [role]


def _is(process: psutil.Process, role: str) -> bool:
    try:
        return ROLES[role] in " ".join(process.cmdline())
    except psutil.Error:
        return False


if __name__ == "__main__":
    sys.exit(main())
