"""The tools share the workspace of an episode, and say what happened."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from boxes import list_boxes, why_no_boxes

from turnwise import Resources, Task, ToolResult
from turnwise.config.parts import Choice
from turnwise.errors import ConfigError, InfrastructureError, PluginError
from turnwise.tools.toolbox import ToolBox, tools_by_name
from turnwise.types import ToolCall
from turnwise_testing.probes.agent import make_task
from turnwise_workspaces import Capabilities, Command, ExecResult
from turnwise_workspaces.bubblewrap import BubblewrapBackend
from turnwise_workspaces.config import WorkspaceToolsConfig
from turnwise_workspaces.tools import describe_result, make_tools

ONCE = "Error: nothing was changed: 'old' must be in 'notes' once, and"
needs_boxes = pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())


def use(
    folder, calls: Sequence[tuple[str, dict[str, object]]], task: Task | None = None, **options
) -> list[ToolResult]:
    """Run calls in one episode."""

    async def run():
        config = WorkspaceToolsConfig(state=str(folder), **options)
        session = ToolBox(tools_by_name(make_tools(config, Resources()))).open_session(task or make_task(), {})
        try:
            return [await session.call(ToolCall(name=name, arguments=arguments)) for name, arguments in calls]
        finally:
            await session.release()
            assert session.release_failures == {}
            assert list_boxes() == []

    return asyncio.run(run())


@needs_boxes
def test_tools_share_a_workspace(tmp_path):
    """A file of one tool is there for the others, and for background processes of earlier calls."""
    results = use(
        tmp_path,
        [
            ("write_file", {"path": "a/b.txt", "content": "one ü two"}),
            ("edit_file", {"path": "a/b.txt", "old": "two", "new": "three"}),
            ("shell", {"command": "cat a/b.txt; (while [ ! -e go ]; do sleep 0.05; done; echo went > seen) &"}),
            ("shell", {"command": "touch go; while [ ! -s seen ]; do sleep 0.05; done; cat seen"}),
            ("read_file", {"path": "a/b.txt"}),
        ],
    )

    texts = ["wrote 10 bytes", "replaced 1 place", "one ü three", "went", "one ü three"]
    assert texts == [result.text for result in results]
    assert not any(result.error for result in results)
    assert results[2].metrics["workspace_commands"] == 1.0


@needs_boxes
def test_mistakes_are_texts_for_the_model(tmp_path):
    """Each names what was wrong; the workspace stays."""
    results = use(
        tmp_path,
        [
            ("shell", {"command": "echo out; exit 3"}),
            ("shell", {"command": "yes | head -c 5000"}),
            ("shell", {"command": "true"}),
            ("read_file", {"path": "missing"}),
            ("read_file", {"path": "notes"}),
            ("edit_file", {"path": "notes", "old": "a", "new": "b"}),
            ("edit_file", {"path": "notes", "old": "zz", "new": "b"}),
            ("edit_file", {"path": "notes", "old": "", "new": "b"}),
            ("write_file", {"path": "/usr/x", "content": "x"}),
            ("write_file", {"path": "x", "content": "\ud800"}),
            ("shell", {"command": "echo \ud800"}),
        ],
        files={"notes": "aa bb" + "c" * 100},
        max_output_bytes=10,
        max_read_bytes=5,
    )
    expected = [
        (True, "out\n[exit code 3]"),
        (False, "y\ny\ny\ny\ny\n[only the first 10 bytes of the output]"),
        (False, "(no output)"),
        (True, "Error: cannot read 'missing': No such file or directory"),
        (False, "aa bb\n[only the first 5 bytes]"),
        (
            True,
            "Error: nothing was changed: 'old' must be in 'notes' once, and it is there 2 times; add lines around it",
        ),
        (True, "Error: nothing was changed: 'old' must be in 'notes' once, and it is not in the file"),
        (True, "Error: 'old' is empty; give the text to replace"),
        (True, "Error: cannot write '/usr/x': Read-only file system"),
        (True, "Error: the text has a character that no file can have, at place 0"),
    ]

    assert expected == [(result.error, result.text) for result in results[:-1]]
    assert results[-1].error


@needs_boxes
def test_programs(tmp_path):
    """Files stay and variables do not; the last line of a failed program says why it failed."""
    write, read = "x = 1; open('n', 'w').write('ü')", "print(open('n').read()); print('x' in globals())"
    codes = [
        write,
        read,
        "print(1)\n1 / 0",
        "raise SystemExit(3)",
        "input()",
        "(",
        "print('\ud800')",
    ]
    calls = [("python", {"code": code}) for code in codes]
    results = use(tmp_path, calls, tools=("python", "shell"), environment={"LANG": "C.UTF-8"})

    assert [result.error for result in results] == [False, False, True, True, True, True, True]
    last = [result.text.splitlines()[-1] for result in results]
    assert last[:5] == [
        "(no output)",
        "False",
        "ZeroDivisionError: division by zero",
        "[exit code 3]",
        "EOFError: EOF when reading a line",
    ]
    assert results[1].text == "ü\nFalse"
    assert last[5].startswith("SyntaxError: ")
    assert last[6] == "Error: the text has a character that no file can have, at place 7"
    assert results[0].metrics["workspace_programs"] == 1.0


@needs_boxes
@pytest.mark.parametrize(
    ("name", "arguments"), [("shell", {"command": "sleep 100"}), ("python", {"code": "while True: pass"})]
)
def test_a_call_ends_with_its_time(name, arguments, tmp_path):
    """The other tests have no such short time: on a busy machine, each of their calls might exceed it."""
    (result,) = use(tmp_path, [(name, arguments)], command_s=0.5, tools=("python", "shell"))

    assert (result.error, result.text) == (True, "[killed after 0.5 s]")


@needs_boxes
def test_a_task_brings_files(tmp_path):
    """Those of its column come beside the config's, and replace equal ones."""
    task = make_task(extra={"files": {"b": "task", "c/d": "deep"}})

    results = use(tmp_path, [("shell", {"command": "cat a b c/d"})], task, files={"a": "config ", "b": "config"})

    assert results[0].text == "config taskdeep"


@needs_boxes
@pytest.mark.parametrize("files", [["a"], {"a": 1}, "a"])
def test_files_of_a_task_that_are_none(files, tmp_path):
    """The episode fails with the place of the row: the model is not to blame."""
    with pytest.raises(
        InfrastructureError, match=r"\(row 0\): column 'files': expected a mapping of texts by path, got"
    ):
        use(tmp_path, [("shell", {"command": "true"})], make_task(extra={"files": files}))


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"image": "busybox"},
            ConfigError,
            "image: the backend 'bubblewrap' shows this machine's programs, not 'busybox'",
        ),
        ({"folder": "/usr/x"}, ConfigError, "folder: a box cannot have its working folder at /usr/x"),
        ({"backend": Choice("bubblewrap", {"readable": ["usr"]})}, ConfigError, "readable: expected an absolute path"),
        ({"backend": Choice("containers")}, ConfigError, "image: the backend 'containers' needs one"),
        (
            {"backend": Choice("bubblewrp")},
            PluginError,
            "unknown workspace backend 'bubblewrp'; did you mean 'bubblewrap'",
        ),
        ({"backend": Choice("bubblewrap", {"sise": 1})}, ConfigError, "sise"),
    ],
)
def test_bad_options(options, kind, text, tmp_path):
    """Each is an error when the tools are built, before any episode."""
    with pytest.raises(kind, match=text):
        make_tools(WorkspaceToolsConfig(state=str(tmp_path), **options), Resources())


def test_a_backend_without_a_network_is_an_error(tmp_path, monkeypatch):
    """The run ends before any episode, as its commands would fail in each."""
    monkeypatch.setattr(BubblewrapBackend, "capabilities", Capabilities())
    with pytest.raises(ConfigError, match="network: the backend 'bubblewrap' knows 'none', not 'host'"):
        make_tools(WorkspaceToolsConfig(state=str(tmp_path), network="host"), Resources())


def test_a_limit_has_a_text():
    """The model reads which limit its command passed."""
    text = describe_result(ExecResult(exit_code=-9, stdout=b"x\n", limit="memory"), Command(argv=("x",)))

    assert text == "x\n[killed: the workspace passed its limit of memory]"
