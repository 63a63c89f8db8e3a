"""Runs a cell of the matrix of ends: the command with its fault, then the same command again, and what each leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from attrs import asdict, field, frozen
from end_cells import RAYS, SIGNALS, Cell
from end_clients import mark_of, talk
from end_faults import MARK, VARIABLE, marked_processes
from training_site import CONFIG, make_site, write_tasks

import turnwise_calculator_demo
from turnwise.errors import DataError
from turnwise.types import Status
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.scripted_run import PLUGIN, environment_of, write_scripted_run

PROGRAM: Final = Path(__file__).with_name("end_faults.py")
HUNG_S: Final = 300.0
"""A command that takes longer is killed, and its cell has failed; a busy machine needs a minute on Ray."""
GONE_S: Final = 120.0
"""Processes that live longer after their command are left. Ray's agents notice the end of a killed Ray late."""
NUM_EPISODES: Final = 10
NUM_STEPS: Final = 3
NUM_SESSIONS: Final = 2
RAY: Final = {
    "name": "ray",
    "num_workers": 1,
    "num_replicas": 1,
    "ray": {
        "heartbeat_s": 1.0,
        "heartbeat_timeout_s": 10.0,
        "backoff_s": 0.1,
        "max_restarts": 1,
        "start_timeout_s": 60.0,
    },
}


@frozen
class Held:
    """
    What a folder holds.

    Attributes:
        parts: the tokens of each finished episode by its name, or true for each finished step.
        is_complete: every file of a complete run is there, and every episode has ended.
        num_failed: episodes that have failed.
        left: temporary files.
        doubled: parts that are there more than once.
    """

    parts: dict[str, Any] = field(factory=dict)
    is_complete: bool = False
    num_failed: int = 0
    left: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()


@frozen
class Ended:
    """
    The end of one command.

    Attributes:
        code: exit code; None if it hung.
        error: its standard error.
        held: what its folder holds.
        processes: the processes that it has left.
        files: what it has left in the folder of temporary files.
    """

    code: int | None
    error: str
    held: Held
    processes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def last_line(self) -> str:
        """The last line of standard error that is not empty."""
        return next((line for line in reversed(self.error.splitlines()) if line.strip()), "")


@frozen
class Outcome:
    """
    What a cell has shown.

    Attributes:
        reached: the command has come to the moment.
        first: the end of the command with the fault.
        resumed: the ends of the command again: with `--resume`, and with `--retry-failed` if the first one names it.
        seconds: of all commands.
    """

    cell: Cell
    reached: bool
    first: Ended
    resumed: tuple[Ended, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def write_site(folder: Path, command: str, runtime: str) -> Path:
    """Write the config of a command, its tasks and its plugins to a folder, which all cells of the command share."""
    folder.mkdir(parents=True, exist_ok=True)
    section: object = RAY if runtime == "ray" else "local"
    if command == "train":
        make_site(folder)
        write_tasks(folder / "tasks.jsonl", 4)
        config = yaml.safe_load(CONFIG)
        del config["data"]["validation_path"]
        config |= {"runtime": section, "memory": {"mode": "standalone"}}
        config["rollout"] |= {"n": 2, "response_length": 4, "max_in_flight": 2}
        config["train"] |= {"num_steps": NUM_STEPS, "tasks_per_step": 2}
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        return folder
    agent = {"name": "external", "command": ["python", "unused.py"], "max_calls": 5} if command == "serve" else "once"
    write_scripted_run(
        folder,
        num_tasks=NUM_EPISODES // 2,
        data={"path": "data.jsonl"} | ({"validation_path": "data.jsonl"} if command == "eval" else {}),
        engine={"name": "scripted", "token_latency_s": 0.002 if runtime == "local" else 0.02},
        agent=agent,
        rollout={"n": 2, "prompt_length": 512, "response_length": 64, "max_in_flight": 2, "validation_n": 2},
        runtime=section,
        plugins=[PLUGIN, *(["gateway"] if command == "serve" else [])],
    )
    if command == "sft":
        _write_rows(folder)
    return folder


def _write_rows(folder: Path) -> None:
    """Write eight rows of ids and labels."""
    rows = [{"input_ids": list(range(3, 20 + number)), "labels": list(range(3, 20 + number))} for number in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "sft.parquet")


def run_cell(cell: Cell, site: Path, folder: Path) -> Outcome:
    """
    Run a cell.

    Args:
        cell: exists.
        site: of its command and runtime, see `write_site`.
        folder: new, for everything that the cell writes; it is removed.
    """
    started = time.monotonic()
    folder.mkdir(parents=True)
    run = _Run(cell, site, folder)
    try:
        first = run.start_and_wait(fault=cell.fault)
        run.released.touch()
        resumed = [run.start_and_wait()]
        if "--retry-failed" in resumed[0].last_line:
            resumed.append(run.start_and_wait("--retry-failed"))
        reached = cell.fault == "none" or run.note.exists()
        return Outcome(cell, reached, first, tuple(resumed), time.monotonic() - started)
    finally:
        run.end_processes()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(run.ray_folder, ignore_errors=True)


class _Run:
    """The commands of one cell, and the folders that they use."""

    def __init__(self, cell: Cell, site: Path, folder: Path) -> None:
        self.cell, self.site, self.folder = cell, site, folder
        self.out, self.note, self.temporary = folder / "out", folder / "reached", folder / "tmp"
        self.released = folder / "released"
        self.temporary.mkdir()
        # Sockets have short paths.
        self.ray_folder = Path(tempfile.gettempdir()) / f"e{zlib.crc32(str(folder).encode()):x}"
        self.ray_folder.mkdir(exist_ok=True)

    def start_and_wait(self, *more: str, fault: str = "none") -> Ended:
        """Run the command of a job, which always asks to resume, to its end."""
        command = [sys.executable, str(PROGRAM), *self._arguments(), *more]
        control = self.out / "control.json"
        old = mark_of(control)
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment(fault),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        client = None
        if self.cell.command == "serve":
            arguments = {"stops": fault == "none" or self.cell.moment in ("writing", "closing")}
            client = threading.Thread(target=talk, args=(process, control, old), kwargs=arguments, daemon=True)
            client.start()
        code, error = self._wait(process)
        if client is not None:
            client.join(HUNG_S)
        left = self._left_processes()
        self.end_processes()
        files = tuple(sorted(path.name for path in self.temporary.iterdir()))
        return Ended(code, error, held_in(self.out, self.cell.command), left, files)

    def _wait(self, process: subprocess.Popen[str]) -> tuple[int | None, str]:
        """Return the exit code, None for a command that hung, and standard error."""
        reader = _Reader(process)
        try:
            code: int | None = process.wait(HUNG_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)
            process.kill()
            process.wait()
            code = None
        # A process that was left may hold the pipe open, so the end of the pipe may not come.
        return code, reader.text()

    def _arguments(self) -> list[str]:
        config, out = str(self.site / "run.yaml"), str(self.out)
        if self.cell.command == "train":
            slowly = ["engine.latency_s=1.5"] if self.cell.fault in RAYS and self.cell.moment == "running" else []
            return ["train", config, *slowly, "--out", out, "--resume"]
        if self.cell.command == "sft":
            rows, model = str(self.site / "sft.parquet"), str(Path(turnwise_calculator_demo.__file__).parent / "model")
            return ["sft", rows, "--model", model, "--batch-size", "2", "--out", out, "--resume"]
        words = ["gateway", "serve"] if self.cell.command == "serve" else [self.cell.command]
        changes = ["runtime.ray.max_restarts=0"] if self.cell.fault in RAYS else []
        if self.cell.fault in RAYS and self.cell.moment == "running":
            changes.append("engine.token_latency_s=0.3")  # the run ends long after the fault
        if self._holds:
            changes.append(f"engine.hold={self.released}")
        return [*words, config, *changes, "--resume", out]

    @property
    def _holds(self) -> bool:
        """Whether some episodes wait, so that the signal finds them, however busy the machine is."""
        cell = self.cell
        return cell.command in ("rollout", "eval") and cell.moment == "running" and cell.fault in SIGNALS

    def _environment(self, fault: str) -> dict[str, str]:
        paths = [str(self.site), environment_of(self.site)["PYTHONPATH"]]
        variables = {
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(self.temporary),
            "RAY_TMPDIR": str(self.ray_folder),
            "TORCHINDUCTOR_CACHE_DIR": str(self.ray_folder / "inductor"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # else each process compiles all sources, which takes longer than the run
            # As for all tests on Ray: the token stays out of the home folder, and actors have the driver's priority.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex,
            "RAY_worker_niceness": "0",
            MARK: str(self.folder),
        }
        if fault != "none":
            options = asdict(self.cell.place) | {"fault": fault, "out": str(self.out), "note": str(self.note)}
            variables[VARIABLE] = json.dumps(options)
        return os.environ | variables

    def _left_processes(self) -> tuple[str, ...]:
        """Wait for the processes of the run to end, and return those that do not."""
        deadline = time.monotonic() + GONE_S
        while (left := marked_processes(str(self.folder))) and time.monotonic() < deadline:
            time.sleep(0.1)
        return tuple(line[:80] for line in left.values())

    def end_processes(self) -> None:
        """Kill what is left of the run."""
        for process in marked_processes(str(self.folder)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class _Reader:
    """Keeps the standard error of a process: a pipe, because a file would be full where the disk is."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._keep, args=(process.stderr,), daemon=True)
        self._thread.start()

    def _keep(self, stream: Any) -> None:
        with stream:
            self._lines.extend(stream)

    def text(self) -> str:
        """Return standard error so far, to its end if that comes soon."""
        self._thread.join(5)
        return "".join(self._lines)


def held_in(out: Path, command: str) -> Held:
    """Return what the folder of a run holds."""
    if not out.is_dir():
        return Held()
    left = tuple(sorted(str(path.relative_to(out)) for path in out.rglob("*") if _is_temporary(path.name)))
    if command == "train":
        steps = _trained_steps(out)
        parts = {f"step {step}": True for step in steps}
        is_complete = max(steps, default=0) == NUM_STEPS and (out / "report.md").exists() and (out / "model").is_dir()
        return Held(parts, is_complete, 0, left, _doubled(_logged_steps(out)))
    if command == "sft":
        is_complete = (out / "log.json").exists() and (out / "model.safetensors").exists()
        return Held({"model": True} if is_complete else {}, is_complete, 0, left)
    parts, names, failed = {}, [], set()
    for name in ("trajectories.parquet", "trajectories.parquet.partial"):
        with suppress(DataError):
            for each in read_results(out / name):
                if each.status is Status.FAILED:
                    failed.add(each.uid)
                if each.status in (Status.COMPLETED, Status.TRUNCATED):
                    parts[each.uid] = [record.input_ids.tolist() for record in each.trajectories]
                    names.append(each.uid)
    files = {"rollout": ("batch.safetensors", "metrics.json"), "eval": ("metrics.json", "evaluation.json"), "serve": ()}
    there = all((out / name).exists() for name in files[command])
    number = NUM_SESSIONS if command == "serve" else NUM_EPISODES
    failed -= parts.keys()
    return Held(parts, there and len(parts) + len(failed) >= number, len(failed), left, _doubled(names))


def _is_temporary(name: str) -> bool:
    return name.endswith((".partial", ".replaced", ".removed", ".complete")) or name.startswith((".tmp", "rescued-"))


def _doubled(names: list[Any]) -> tuple[str, ...]:
    return tuple(sorted({str(name) for name in names if names.count(name) > 1}))


def _trained_steps(out: Path) -> list[int]:
    """Return the steps up to the latest whole checkpoint."""
    found = [path.name.partition("-")[2] for path in (out / "checkpoints").glob("step-????????")]
    return list(range(1, max(map(int, found), default=0) + 1))


def _logged_steps(out: Path) -> list[int]:
    if not (out / "metrics.jsonl").exists():
        return []
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "reward/mean" in line]


def as_record(value: Mapping[str, Any]) -> Outcome:
    """Return the outcome that plain values describe."""
    first, resumed = _ended(value["first"]), tuple(map(_ended, value["resumed"]))
    return Outcome(Cell(**value["cell"]), value["reached"], first, resumed, value["seconds"])


def _ended(value: Mapping[str, Any]) -> Ended:
    held = value["held"]
    return Ended(
        **{
            **value,
            "held": Held(**{**held, "left": tuple(held["left"]), "doubled": tuple(held["doubled"])}),
            "processes": tuple(value["processes"]),
            "files": tuple(value["files"]),
        }
    )
