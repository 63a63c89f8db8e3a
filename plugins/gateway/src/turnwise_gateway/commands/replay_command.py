"""`turnwise gateway replay`: the stored requests of sessions against a fresh gateway."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attrs import asdict, frozen

from turnwise import Host, RunConfig, configure_logging, load_resolved
from turnwise.errors import ConfigError, DataError
from turnwise.terminal import write_output
from turnwise_gateway.control.agent_session import AgentSession
from turnwise_gateway.replay.replayed_session import find_difference
from turnwise_gateway.replay.request_file import RequestFile, read_requests
from turnwise_gateway.serving.output import REQUESTS_DIR
from turnwise_gateway.serving.replays import Replays, open_replays
from turnwise_result_files.resumption import CONFIG_FILE


@frozen(kw_only=True)
class Replayed:
    """
    The end of a replay.

    Attributes:
        file: with the requests.
        num_calls: requests in the file.
        num_records: of the replayed session.
        difference: the first one; None for none.
        is_whole: the file has the end of its session, so that the records were compared.
    """

    file: str
    num_calls: int
    num_records: int
    difference: str | None
    is_whole: bool


class ReplayCommand:
    """Replays sessions whose requests were kept."""

    help = "send the stored requests of sessions to a fresh gateway, and compare the records"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Examples:\n"
            "  turnwise gateway serve run.yaml --out runs/served --keep-requests\n"
            "  turnwise gateway replay runs/served\n"
            "  turnwise gateway replay runs/served/requests/0a1b2c3d4e5f6071.jsonl --json\n"
            "  turnwise gateway replay runs/requests --config run.yaml\n\n"
            "Sends each request over HTTP to a gateway with an engine that gives the recorded tokens, in the recorded\n"
            "order, and compares turns, records and lineage id for id. No model runs; the tokenizer and the chat\n"
            "template of the config are used.\n"
            "Exit codes: 0; 1 when a session differs; 2 for bad input."
        )
        parser.add_argument("path", type=Path, metavar="RUN_OR_FILE", help="folder of a run or of files, or one file")
        parser.add_argument("--config", metavar="FILE", help="config of the run; the one in its folder if left out")
        parser.add_argument("--json", action="store_true", help="print JSON instead of lines")

    def run(self, arguments: argparse.Namespace) -> int:
        files = [read_requests(path) for path in _find_files(arguments.path)]
        config, host = load_resolved(arguments.config or _find_config(arguments.path))
        configure_logging("error", config.telemetry.log_format, whole_stream=True)
        replayed = _replay_all(config, host, files)
        if arguments.json:
            write_output(json.dumps({"sessions": [asdict(each) for each in replayed]}, indent=2) + "\n")
        else:
            write_output("".join(f"{_line(each)}\n" for each in replayed))
        return 1 if any(each.difference for each in replayed) else 0


def _line(replayed: Replayed) -> str:
    size = f"{replayed.num_calls} calls, {replayed.num_records} records"
    whole = "" if replayed.is_whole else "; the file has no end, so turns alone were compared"
    return f"{replayed.file}: {size}: {replayed.difference or 'equal'}{whole}"


def _find_files(path: Path) -> list[Path]:
    folder = path / REQUESTS_DIR if (path / REQUESTS_DIR).is_dir() else path
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: holds no files with requests; was the gateway started with --keep-requests?")
    return files


def _find_config(path: Path) -> Path:
    found = [folder / CONFIG_FILE for folder in (path, *path.absolute().parents) if (folder / CONFIG_FILE).is_file()]
    if not found:
        raise ConfigError(f"{path}: there is no {CONFIG_FILE} above it: give --config FILE")
    return found[0]


def _replay_all(config: RunConfig, host: Host, files: list[RequestFile]) -> list[Replayed]:
    with open_replays(config, host) as replays:
        return [_replay(replays, file) for file in files]


def _replay(replays: Replays, file: RequestFile) -> Replayed:
    done = replays.run(file, AgentSession.end)
    difference = done.difference
    if difference is None and file.records is not None:
        difference = find_difference(file.records, done.records)
    num_calls = sum(event["event"] == "call" for event in file.events)
    return Replayed(
        file=str(file.path),
        num_calls=num_calls,
        num_records=len(done.records),
        difference=difference,
        is_whole=file.records is not None,
    )
