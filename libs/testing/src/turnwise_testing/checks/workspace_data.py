"""Requirements of backends of workspaces for any data and any names, as properties."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise_testing.checks.workspace import WorkspaceProbe, check, shell
from turnwise_testing.checks.workspace_network import WORKSPACES as WORKSPACES
from turnwise_testing.probes.engine import expect_equal
from turnwise_workspaces import Command, Workspace

_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40)
_PATHS = st.lists(_NAMES.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3).map("/".join)
# In a container each file takes four processes, half a second in all, and the whole check has a minute.
_settings = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@check
def check_any_file_comes_back(probe: WorkspaceProbe) -> None:
    """Any bytes under any name come back as they were, by a read and by a command."""

    async def use(workspace: Workspace, path: str, data: bytes) -> None:
        path = f"files/{path}"
        await workspace.write(path, data)
        expect_equal(await workspace.read(path, max_bytes=len(data) + 1), data, f"the file {path!r}")
        result = await workspace.exec(Command(argv=("cat", "--", path)))
        expect_equal(result.stdout, data, f"the output of cat {path!r}")
        await shell(workspace, "rm -rf files")

    _check_property(probe, use, _PATHS, st.binary(max_size=3000))


@check
def check_any_input_comes_back(probe: WorkspaceProbe) -> None:
    """Any standard input comes back as output, up to the bound, and the result says if there was more."""

    async def use(workspace: Workspace, data: bytes, bound: int) -> None:
        result = await workspace.exec(Command(argv=("cat",), stdin=data, max_output_bytes=bound))
        expect_equal((result.stdout, result.truncated), (data[:bound], len(data) > bound), "output and `truncated`")

    sizes = st.sampled_from((0, 1, 1000, 65535, 65536, 65537, 300_000))
    data = st.one_of(st.binary(max_size=100), sizes.map(lambda size: b"\0\xff\n" * (size // 3) + b"x" * (size % 3)))
    _check_property(probe, use, data, st.one_of(st.integers(0, 100), sizes))


def _check_property(
    probe: WorkspaceProbe, use: Callable[..., Coroutine[Any, Any, None]], *strategies: st.SearchStrategy[Any]
) -> None:
    """Run a property in one workspace, because each start takes a part of a second."""
    with asyncio.Runner() as runner:
        opened = probe.workspace()
        workspace = runner.run(opened.__aenter__())

        @_settings
        @given(st.tuples(*strategies))
        def hold(values: tuple[object, ...]) -> None:
            runner.run(use(workspace, *values))

        try:
            hold()
        finally:
            runner.run(opened.__aexit__(None, None, None))
