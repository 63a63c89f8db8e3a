"""
Kills processes of `turnwise rollout` at random moments, resumes until the run is complete, and compares the results.

Each run gets one to four SIGKILLs: of the driver, or on Ray of a worker, a replica, a reward worker or the GCS. Each
kill has a random event of the run: of its start-up, a number of scored episodes, or a file that appears after the last
episode. When the command ends early, `--resume` continues the run, and later kills hit the resumed parts. A run that
ends before its last kill is not a run: it is repeated with other moments. In the end every episode must be there
exactly once with the tokens and the reward of an undisturbed run, with the batch and the metrics, and no process of
the runs may be left.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
import yaml
from attrs import define, field
from kill_moments import FINISHED, PHASES, ROLES, Delivered, Kill, Part, num_finished_in
from measurement import describe_machine, format_spread

from turnwise import EpisodeResult
from turnwise.errors import DataError
from turnwise_result_files import load_batch, read_results
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import SITE, environment_of, write_scripted_run

EXAMPLES: Final = """\
Examples:
  python benchmarks/random_kills.py --runs 200 --minutes 180
  python benchmarks/random_kills.py --runtime local --runs 60
  python benchmarks/random_kills.py --runtime ray --runs 20 --seed 7

Exit codes: 0; 1 if a run lost, doubled or changed an episode, left out its batch or metrics, hung, or left a process,
or if fewer runs than asked were complete; 130 after Ctrl-C, which prints the figures so far.
"""
PLUGIN: Final = Path(__file__).with_name("killed_parts.py")
SCORED_FILE: Final = "TURNWISE_BENCHMARK_SCORED"
MAX_PARTS: Final = 12
"""Parts of one run; more mean that resuming does not end."""
PART_S: Final = 600.0
"""A part that takes longer hangs."""
FILES: Final = {"config.resolved.yaml", "trajectories.parquet", "batch.safetensors", "metrics.json"}
"""The files of a complete run."""
TOKEN_LATENCY_S: Final = {"local": 0.005, "ray": 0.03}
"""On Ray it takes longer to find a process than to run all episodes of a fast engine."""
GCS_PATIENCE: Final = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
"""Ray ends a driver whose GCS is lost after this time, which is a minute without it."""
GONE_S: Final = 120.0
"""Processes that live longer after the last run are left."""


def main() -> int:
    """Run, print and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="complete runs in all (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=400, help="episodes of a run (default: %(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="stop after them; the current run does not count (default: %(default)s)",
    )
    parser.add_argument("--runtime", choices=("both", "local", "ray"), default="both", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims (default: %(default)s)")
    options = parser.parse_args()
    runtimes = ("local", "ray") if options.runtime == "both" else (options.runtime,)
    deadline = time.monotonic() + 60 * options.minutes
    print(describe_machine(), flush=True)
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), options.episodes)
        try:
            site.run_undisturbed(runtimes[0])
            for number in range(options.runs):
                run_until_killed(site, runtimes[number % len(runtimes)], f"{options.seed}/{number}", deadline, figures)
        except KeyboardInterrupt:
            print("interrupted")
            figures.print_all(options.episodes)
            return 130
    figures.find_processes()
    figures.print_all(options.episodes)
    return 0 if figures.num_complete == options.runs and not figures.num_wrong else 1


def run_until_killed(site: Site, runtime: str, name: str, deadline: float, figures: Figures) -> None:
    """Repeat a run with other moments until it has received all kills, or there is no time for another one."""
    attempt = 0
    while time.monotonic() < deadline:
        attempt += 1
        started = time.monotonic()
        run = KilledRun(site, runtime, random.Random(f"{name}/{attempt}"), deadline)
        error = run.error()
        seconds = time.monotonic() - started
        if run.was_cut:
            print(f"{name} {runtime} {seconds:.0f} s: no time left, not counted", flush=True)
            return
        complete = not run.plan and not error
        figures.add(name, runtime, run, seconds, error)
        state = error or ("complete" if complete else f"not a run: it ended before the kill of {run.plan[0]}")
        killed = ", ".join(map(str, run.kills)) or "nothing"
        print(f"{name} {runtime} {seconds:.0f} s, {run.num_parts} parts, killed: {killed}: {state}", flush=True)
        if complete or error:
            return


class Site:
    """A folder with the plugin, a data set, and a config for each runtime."""

    def __init__(self, folder: Path, num_episodes: int) -> None:
        self.folder = folder
        self.num_episodes = num_episodes
        self.expected: dict[str, object] = {}
        install_plugin(folder / SITE, "killed_parts", PLUGIN.read_text(encoding="utf-8"))
        for runtime in ("local", "ray"):
            section = {"name": "ray", "num_workers": 2, "num_replicas": 2, "reward_workers": 1}
            section |= {"ray": {"heartbeat_s": 0.5, "heartbeat_timeout_s": 5.0, "backoff_s": 0.1, "max_restarts": 20}}
            config = write_scripted_run(
                folder,
                num_tasks=num_episodes,
                engine={"name": "killed_scripted", "token_latency_s": TOKEN_LATENCY_S[runtime]},
                agent="killed_two_turns",
                reward="killed_length",
                rollout={"prompt_length": 64, "response_length": 128},
                runtime=section if runtime == "ray" else "local",
                plugins=["killed_parts"],
            )
            sections = yaml.safe_load(config.read_text())
            del sections["model"]
            (folder / f"{runtime}.yaml").write_text(yaml.safe_dump(sections))

    def run_undisturbed(self, runtime: str) -> None:
        """Keep the episodes of a run without kills; they are the same in both runtimes."""
        out = self.folder / "undisturbed"
        process = self.start(f"{runtime}.yaml", "--out", str(out))
        try:
            code = process.wait(PART_S)
        finally:
            end(process)
        if code != 0:
            raise SystemExit(f"the undisturbed run failed:\n{self.log()[-3000:]}")
        self.expected = summary_of(read_results(out))

    def start(self, *arguments: str, scored: Path | None = None) -> subprocess.Popen[bytes]:
        """Start `turnwise rollout` in the folder; its output goes to a log."""
        command = [sys.executable, "-m", "turnwise.cli", "rollout", *arguments]
        environment = environment_of(self.folder) | GCS_PATIENCE | ({SCORED_FILE: str(scored)} if scored else {})
        with (self.folder / "log").open("w") as log:
            # A separate session: Ctrl-C reaches this script alone, which prints the figures.
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def log(self) -> str:
        """Return the output of the latest command."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")


class KilledRun:
    """
    A run that is killed and resumed until it is complete.

    Attributes:
        plan: the kills that it has not received.
        kills: the kills that it has received.
        num_parts: commands that it took.
        seen: processes that its commands had started at the times of the kills.
        num_repeated: failed episodes that `--retry-failed` ran again, over all parts.
        was_cut: the time of the script ended first.
    """

    def __init__(self, site: Site, runtime: str, chance: random.Random, deadline: float) -> None:
        self.site = site
        self.runtime = runtime
        self.chance = chance
        self.out = site.folder / f"{runtime}-{chance.random()}"
        self.plan = Kill.plan(["driver"] if runtime == "local" else ["driver", *ROLES], chance)
        self.kills: list[Delivered] = []
        self.num_parts = self.num_repeated = 0
        self.was_cut = False
        self.deadline = deadline
        self.seen: set[psutil.Process] = set()

    def error(self) -> str:
        """Run all parts and return the first thing wrong, or an empty string."""
        code = 1
        while self.num_parts < MAX_PARTS:
            part = self._start()
            try:
                code = self._play(part)
            except subprocess.TimeoutExpired:
                self.was_cut = time.monotonic() >= self.deadline
                return f"part {self.num_parts} still runs after {PART_S:g} s: {self.site.log()[-500:]}"
            finally:
                end(part.process)
            if code == 0 and not self._num_failed():
                break
        else:
            return f"not complete after {MAX_PARTS} parts; the last one exited with {code}: {self.site.log()[-500:]}"
        return self._find_error()

    def _start(self) -> Part:
        """Start the command, or resume it if an earlier part has written its config."""
        is_resume = (self.out / "config.resolved.yaml").exists()
        arguments = ["--resume", str(self.out), "--retry-failed"] if is_resume else [f"{self.runtime}.yaml", "--out"]
        self.num_parts += 1
        self.num_repeated += is_resume and self._num_failed()
        num_before, was_complete = num_finished_in(self.out), (self.out / "metrics.json").exists()
        scored = self.out.with_name(f"{self.out.name}.scored-{self.num_parts}")
        process = self.site.start(*arguments, *([] if is_resume else [str(self.out)]), scored=scored)
        was_complete &= num_before == self.site.num_episodes
        return Part(
            self.runtime, process, self.out, scored, self.site.num_episodes, is_resume, num_before, was_complete
        )

    def _play(self, part: Part) -> int:
        """Deliver the kills of a part and return its exit code."""
        deadline = min(self.deadline, time.monotonic() + PART_S)
        while self.plan and (kill := self.plan[0].deliver(part, self.chance, deadline)):
            self.kills.append(kill)
            del self.plan[0]
        self.seen |= part.seen
        return part.process.wait(timeout=max(0.0, deadline - time.monotonic()))

    def _num_failed(self) -> int:
        try:
            return sum(each.status not in FINISHED for each in read_results(self.out))
        except DataError:  # a part that was killed before its first episode leaves no file
            return 0

    def _find_error(self) -> str:
        """Return the first thing wrong with the results, or an empty string."""
        try:
            results = read_results(self.out)
            rows = load_batch(self.out / "batch.safetensors").rows
            counted = json.loads((self.out / "metrics.json").read_text())["episodes"]
        except (DataError, OSError) as error:
            return str(error)
        if not self.site.num_episodes == len(results) == len(rows) == counted:
            return f"{len(results)} episodes, {len(rows)} rows of the batch, {counted} in the metrics"
        if summary_of(results) != self.site.expected:
            return "tokens or rewards differ from the undisturbed run"
        return f"left files: {sorted(left)}" if (left := {each.name for each in self.out.iterdir()} - FILES) else ""


@define
class Figures:
    """The sums over all runs."""

    num_complete: int = 0
    num_wrong: int = 0
    num_repeated: int = 0
    num_missed: int = 0
    minutes: dict[str, list[float]] = field(factory=lambda: defaultdict(list))
    kills: Counter[Delivered] = field(factory=Counter)
    runs_by_role: Counter[str] = field(factory=Counter)
    seen: dict[psutil.Process, str] = field(factory=dict)

    def add(self, name: str, runtime: str, run: KilledRun, seconds: float, error: str) -> None:
        """Count a run; one that ended before its last kill counts only if it is wrong."""
        self.num_repeated += run.num_repeated
        self.seen |= dict.fromkeys(run.seen, name)
        self.num_wrong += bool(error)
        if run.plan and not error:
            self.num_missed += 1
            return
        self.kills.update(run.kills)
        self.runs_by_role.update({kill.role for kill in run.kills})
        self.num_complete += not error
        self.minutes[runtime].append(seconds / 60)

    def find_processes(self) -> None:
        """Count the runs that have left processes. Ray's end by themselves about a minute after the driver."""
        _gone, alive = psutil.wait_procs([*self.seen], timeout=GONE_S)
        for process in alive:
            print(f"{self.seen[process]} left a process: {process}")
        self.num_wrong += len({self.seen[process] for process in alive})

    def print_all(self, num_episodes: int) -> None:
        """Print the kills by role, and the runs."""
        for role in dict.fromkeys(each.role for each in self.kills):
            own = {each: count for each, count in self.kills.items() if each.role == role}
            phases = {phase: sum(count for each, count in own.items() if each.phase == phase) for phase in PHASES}
            resumed = sum(count for each, count in own.items() if each.is_resume)
            shown = ", ".join(f"{phase} {count}" for phase, count in phases.items())
            print(
                f"{role:13} {sum(own.values()):4} kills in {self.runs_by_role[role]} runs: {shown};"
                f" {resumed} of them during a resume"
            )
        for runtime, minutes in self.minutes.items():
            print(f"{runtime:13} {len(minutes):4} runs, {format_spread(minutes, 2)} minutes each")
        print(
            f"{self.num_complete} complete runs of {num_episodes} episodes, {self.num_wrong} wrong; {self.num_missed}"
            f" not counted, which ended before their last kill; {self.num_repeated} failed episodes ran again"
        )


def summary_of(results: list[EpisodeResult]) -> dict[str, object]:
    """Return the reward and the ids of each episode by uid; an episode that is there twice counts once."""
    return {each.uid: (each.reward, each.trajectories[0].input_ids.tolist()) for each in results if each.trajectories}


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command that still runs, with all that it started."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
