"""A running box as its host sees it: each method is a request to its supervisor."""

from __future__ import annotations

import itertools
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

from attrs import define, evolve, field

from turnwise.errors import InfrastructureError
from turnwise_workspaces.box_channel import BoxChannel
from turnwise_workspaces.workspace import (
    SNAPSHOT_S,
    Command,
    ExecResult,
    OnOutput,
    OnStream,
    Snapshot,
    WorkspaceFileError,
    check_snapshot,
)

_FILE_S: Final = 30.0
_NO_BOUND: Final = 2**62


@define(eq=False)
class BoxWorkspace:
    """A running box."""

    _channel: BoxChannel
    _name: str = field(factory=lambda: uuid.uuid4().hex, init=False)
    _snapshots: set[str] = field(factory=set, init=False)
    _numbers: Iterator[int] = field(factory=itertools.count, init=False)

    async def listen(self) -> socket.socket:
        return await self._channel.take_socket()

    async def run(self, command: Command, on_output: OnStream) -> ExecResult:
        whole = evolve(command, separate=True, max_output_bytes=_NO_BOUND)
        take = cast("Callable[[str, bytes], None]", on_output)  # the supervisor names the same streams
        return _result_of(await self._channel.ask(_header_of(whole), command.stdin, take))

    async def exec(self, command: Command, on_output: OnOutput | None = None) -> ExecResult:
        pieces: dict[str, bytearray] = {"out": bytearray(), "err": bytearray()}
        failed: list[Exception] = []

        def collect(stream: str, data: bytes) -> None:
            pieces[stream] += data
            if on_output is not None and not failed:
                try:
                    on_output(data)
                except Exception as error:  # noqa: BLE001 - raised after the command
                    failed.append(error)

        reply = await self._channel.ask(_header_of(command), command.stdin, collect)
        if failed:
            raise failed[0]
        return evolve(_result_of(reply), stdout=bytes(pieces["out"]), stderr=bytes(pieces["err"]))

    async def read(self, path: str, *, max_bytes: int, offset: int = 0) -> bytes:
        return await self._use_file({"do": "read", "path": path, "max_bytes": max_bytes, "offset": offset}, max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._use_file({"do": "write", "path": path}, 0, data)

    async def end_processes(self) -> None:
        await self._channel.ask({"do": "end_processes"})

    async def snapshot(self) -> Snapshot:
        taken = Snapshot(workspace=self._name, name=str(next(self._numbers)))
        reply, reason = await self._use_archive("snapshot", taken)
        if reply["exit_code"] != 0:
            raise WorkspaceFileError(f"Error: the files cannot be copied: {reason}")
        self._snapshots.add(taken.name)
        return taken

    async def restore(self, snapshot: Snapshot) -> None:
        check_snapshot(snapshot, self._name, self._snapshots)
        reply, reason = await self._use_archive("restore", snapshot)
        if reply["exit_code"] != 0:
            raise InfrastructureError(f"the files of a snapshot cannot be brought back: {reason}")

    async def drop(self, snapshot: Snapshot) -> None:
        check_snapshot(snapshot, self._name, self._snapshots)
        self._snapshots.discard(snapshot.name)
        await self._channel.ask({"do": "drop", "snapshot": int(snapshot.name)})

    async def close(self) -> None:
        self._channel.end_box()
        await self._channel.ended.wait()
        self._channel.close()

    def kill(self) -> None:
        self._channel.kill()

    async def _use_file(self, header: dict[str, Any], max_bytes: int, data: bytes = b"") -> bytes:
        pieces: dict[str, bytearray] = {"out": bytearray(), "err": bytearray()}
        # The reason of a failure counts as output.
        header = {**header, "timeout_s": _FILE_S, "max_output_bytes": max_bytes + 1000, "separate": True}
        reply = await self._channel.ask(header, data, lambda stream, piece: pieces[stream].extend(piece))
        if reply["exit_code"] != 0:
            reason = bytes(pieces["err"]).decode(errors="replace") or "it took too long, or was killed"
            raise WorkspaceFileError(f"Error: cannot {header['do']} {header['path']!r}: {reason}")
        return bytes(pieces["out"])

    async def _use_archive(self, what: str, snapshot: Snapshot) -> tuple[dict[str, Any], str]:
        """Save or restore; return the reply of the supervisor, and the reason of a failure."""
        header = {"do": what, "snapshot": int(snapshot.name), "timeout_s": SNAPSHOT_S, "max_output_bytes": 1000}
        errors = bytearray()
        reply = await self._channel.ask(header, output=lambda _stream, piece: errors.extend(piece))
        return reply, errors.decode(errors="replace") or "it took too long, or was killed"


def _header_of(command: Command) -> dict[str, Any]:
    return {
        "do": "exec",
        "argv": list(command.argv),
        "environment": dict(command.environment),
        "timeout_s": command.timeout_s,
        "max_output_bytes": command.max_output_bytes,
        "separate": command.separate,
    }


def _result_of(reply: Mapping[str, Any]) -> ExecResult:
    return ExecResult(
        exit_code=reply["exit_code"],
        timed_out=reply["timed_out"],
        truncated=reply["truncated"],
        limit=reply["limit"],
        wall_s=reply["wall_s"],
    )
