"""Requirements of backends of workspaces with snapshots: a restoration brings the files back, and ends processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from attrs import frozen
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from turnwise.errors import InfrastructureError
from turnwise_testing.checks.workspace import WorkspaceProbe, check, count, in_background, shell
from turnwise_testing.checks.workspace_data import WORKSPACES as WORKSPACES
from turnwise_testing.probes.engine import expect, expect_equal
from turnwise_workspaces import Command, Snapshot, Snapshots, Workspace

_NO_SNAPSHOTS: Final = "the backend takes no snapshots"
_NAMES: Final = ("a", "b", "-c", "d e", "ü'\n")
_PATHS: Final = st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3).map("/".join)
_LIST: Final = """
for p in "$@"; do
  if [ -L "$p" ]; then echo "link to $(readlink "$p")"
  elif [ -d "$p" ]; then echo "folder $(stat -c %a "$p") with $(ls -A "$p" | wc -l) lines"
  elif [ -p "$p" ]; then echo "pipe $(stat -c %a "$p")"
  elif [ -f "$p" ]; then echo "file $(stat -c '%a %h %Y' "$p") $(cksum < "$p")"
  else echo nothing; fi
done
"""
_MAKE: Final = """
cd "$1" && shift
while [ $# -gt 0 ]; do
  mkdir -p "./$(dirname "./$2")"
  case $1 in
    file) [ ! -p "./$2" ] && printf %s "$3" > "./$2" && chmod "$4" "./$2";;
    folder) mkdir -p "./$2";;
    link) ln -s "$3" "./$2";;
    pipe) mkfifo -m "$4" "./$2";;
    name) [ ! -p "./$2" ] && echo two > "./$2" && ln "./$2" "./$2-too";;
    gone) rm -rf "./$2";;
  esac
  shift 4
done 2>/dev/null
true
"""
"""Makes files and ignores errors: a path may lie below a file. Writes to no pipe: that would wait for a reader."""
_EMPTY: Final = 'chmod -R u+rwx "$1"; rm -rf "$1"; mkdir "$1"'


@frozen
class _Step:
    """A change of a path."""

    kind: str
    path: str
    text: str = ""
    mode: int = 0o644

    @property
    def words(self) -> tuple[str, ...]:
        return (self.kind, self.path, self.text, f"{self.mode:o}")


_MODES: Final = st.sampled_from((0o400, 0o444, 0o600, 0o644, 0o755, 0o700, 0o4711))
_STEPS: Final = st.lists(
    st.builds(
        _Step,
        kind=st.sampled_from(("file", "folder", "link", "pipe", "name", "gone")),
        path=_PATHS,
        text=st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), min_size=1, max_size=20),
        mode=_MODES,
    ),
    min_size=1,
    max_size=8,
)
# Each example has a restoration, which takes a second in a container.
_settings = settings(max_examples=6, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def _why_none(probe: WorkspaceProbe) -> str | None:
    return None if probe.make_backend().capabilities.snapshots else _NO_SNAPSHOTS


def _with_snapshots(workspace: Workspace) -> Snapshots:
    expect(isinstance(workspace, Snapshots), f"{type(workspace).__name__} has no methods of Snapshots")
    assert isinstance(workspace, Snapshots)
    return workspace


async def _run(workspace: Workspace, script: str, *words: str) -> bytes:
    """Run a script with arguments, which must succeed, and return its output."""
    done = await workspace.exec(Command(argv=("/bin/sh", "-c", script, "sh", *words), timeout_s=20.0))
    expect_equal((done.exit_code, done.truncated), (0, False), f"the end of a script with {done.stdout!r}")
    return done.stdout


async def _list_tree(workspace: Workspace, paths: Sequence[str]) -> bytes:
    return await _run(workspace, _LIST, *paths)


@check
def check_a_snapshot_brings_any_tree_back(probe: WorkspaceProbe) -> str | None:
    """Bytes, modes, times, links, pipes and empty folders are as before any later change, and new files are gone."""
    if reason := _why_none(probe):
        return reason

    async def use(workspace: Workspace, before: list[_Step], after: list[_Step]) -> None:
        place = f"{probe.example.spec.folder}/tree"
        await _run(workspace, _EMPTY, place)
        await _run(workspace, _MAKE, place, *(word for step in before for word in step.words))
        paths = sorted({f"{place}/{path}" for step in (*before, *after) for path in _prefixes(step.path)} | {place})
        expected = await _list_tree(workspace, paths)
        kept = await _with_snapshots(workspace).snapshot()
        expect_equal(await _list_tree(workspace, paths), expected, "the files after a snapshot")
        await _run(workspace, _MAKE, place, *(word for step in after for word in step.words))
        await _with_snapshots(workspace).restore(kept)
        expect_equal(await _list_tree(workspace, paths), expected, "the files after a restoration")
        await _with_snapshots(workspace).drop(kept)

    with asyncio.Runner() as runner:
        opened = probe.workspace()
        workspace = runner.run(opened.__aenter__())

        @_settings
        @given(_STEPS, _STEPS)
        @example([_Step("pipe", "a"), _Step("link", "-c", "a")], [_Step("file", "a", "text"), _Step("name", "-c")])
        def hold(before: list[_Step], after: list[_Step]) -> None:
            runner.run(use(workspace, before, after))

        try:
            hold()
        finally:
            runner.run(opened.__aexit__(None, None, None))
    return None


def _prefixes(path: str) -> Sequence[str]:
    """Return a path, its folders, and the second name that `_MAKE` may give it."""
    parts = path.split("/")
    return [*("/".join(parts[: count + 1]) for count in range(len(parts))), f"{path}-too"]


@check
async def check_snapshots_are_restored_again_and_again(probe: WorkspaceProbe) -> str | None:
    """In any order and after a command that was killed, in every folder that the agent can write."""
    if reason := _why_none(probe):
        return reason
    async with probe.workspace(folders=("/more",), environment={"WORD": "one"}) as workspace:
        snapshots = _with_snapshots(workspace)
        kept: dict[str, Snapshot] = {}
        for text in ("1", "2"):
            await shell(workspace, f"for d in . /tmp /more; do echo {text} > $d/number; done")
            kept[text] = await snapshots.snapshot()
        # The folder may contain files of the backend too.
        names = (await shell(workspace, "ls")).stdout.decode()
        for text in ("1", "2", "1", "1"):
            killed = await shell(
                workspace, "rm -rf ./* /tmp/*; head -c 1000000 /dev/zero > new; sleep 98767", timeout_s=1
            )
            expect(killed.timed_out, f"the command ended: {killed}")
            await snapshots.restore(kept[text])
            found = await shell(workspace, "cat number /tmp/number /more/number; ls; echo $WORD; pwd")
            expected = f"{text}\n{text}\n{text}\n{names}one\n{probe.example.spec.folder}\n".encode()
            expect_equal((found.stdout, found.exit_code), (expected, 0), "the files, variables and folder")
    probe.expect_nothing_left()
    return None


@check
async def check_a_restoration_ends_processes(probe: WorkspaceProbe) -> str | None:
    """A snapshot spares processes in the background, and a restoration kills them; a command that runs has a result."""
    if reason := _why_none(probe):
        return reason
    async with probe.workspace() as workspace:
        sleep = in_background("sleep 98768")
        await shell(workspace, f": > ticks; {sleep}; (while :; do echo tick >> ticks; done) & true")
        kept = await _with_snapshots(workspace).snapshot()
        expect_equal(await count(workspace, "sleep 98768"), 1, "the process in the background after a snapshot")
        await shell(
            workspace,
            "n=$(wc -l < ticks); while [ $(wc -l < ticks) -le $n ]; do :; done",
            # It runs on: the shell waits for another line of it.
        )
        seen = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            command = Command(argv=("/bin/sh", "-c", "echo begin; sleep 98769"))
            running = group.create_task(workspace.exec(command, lambda _data: seen.set()))
            await seen.wait()
            await _with_snapshots(workspace).restore(kept)
        expect_equal((running.result().stdout, running.result().timed_out), (b"begin\n", False), "the killed command")
        left = [await count(workspace, f"sleep {number}") for number in (98768, 98769)]
        expect_equal(left, [0, 0], "processes after a restoration")
        first = (await shell(workspace, "wc -l < ticks; sleep 0.2; wc -l < ticks")).stdout.split()
        expect_equal(first[0], first[1], "lines of a process that is gone")
    return None


@check
async def check_snapshots_that_are_none(probe: WorkspaceProbe) -> str | None:
    """One that was dropped or is another workspace's is the caller's mistake; a closed workspace is lost."""
    if reason := _why_none(probe):
        return reason
    async with probe.workspace() as workspace, probe.workspace() as other:
        snapshots = _with_snapshots(workspace)
        kept, dropped = await snapshots.snapshot(), await snapshots.snapshot()
        await snapshots.drop(dropped)
        for one in (dropped, await _with_snapshots(other).snapshot(), Snapshot(workspace="", name="")):
            for call in (snapshots.restore, snapshots.drop):
                try:
                    await call(one)
                except ValueError:
                    continue
                raise AssertionError(f"{call.__name__} took a snapshot that the workspace does not have")
        await snapshots.restore(kept)
        await workspace.close()
        for late in (snapshots.snapshot, lambda: snapshots.restore(kept)):
            try:
                await late()
            except InfrastructureError:
                continue
            raise AssertionError("a workspace that is closed took or restored a snapshot")
    probe.expect_nothing_left()
    return None
