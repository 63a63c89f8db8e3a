"""The columns of a task that describe its workspace."""

from __future__ import annotations

import pytest

from turnwise import Resources, Task
from turnwise.errors import InfrastructureError
from turnwise_workspaces.config import WorkspaceToolsConfig
from turnwise_workspaces.tools import make_tools

OPTIONS = {"image": "", "files": {"a": "1", "b": "1"}, "environment": {"X": "1", "Y": "1"}}


def spec_of(**extra):
    """Return the specification of a task's workspace."""
    (tool, *_) = make_tools(WorkspaceToolsConfig(**OPTIONS), Resources())
    return tool.use.spec(Task(messages=(), uid="t", extra=extra))


def test_columns_come_before_the_options():
    """Files and variables are joined; image and folder replace the options' own."""
    own = {"image": "local/one", "folder": "/app", "folders": ["/logs"], "environment": {"Y": "2"}}

    spec = spec_of(files={"b": "2", "c": {"base64": "/wA="}}, workspace=own)

    assert spec.files == {"a": b"1", "b": b"2", "c": b"\xff\0"}
    assert (spec.image, spec.folder, spec.folders) == ("local/one", "/app", ("/logs",))
    assert spec.environment == {"X": "1", "Y": "2"}
    assert spec_of().folder == "/workspace"


@pytest.mark.parametrize("options", ["none", "host"])
def test_a_task_has_no_more_of_the_network_than_the_options(options):
    """It may do without, and cannot ask for the network of the host."""
    config = WorkspaceToolsConfig(network=options)
    (tool, *_) = make_tools(config, Resources())
    for own, expected in (({}, options), ({"network": "none"}, "none"), ({"network": ""}, options)):
        assert tool.use.spec(Task(messages=(), uid="t", extra={"workspace": own})).network == expected
    with pytest.raises(InfrastructureError, match="column 'workspace': network"):
        tool.use.spec(Task(messages=(), uid="t", extra={"workspace": {"network": "host"}}))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"files": 3}, "column 'files': expected a mapping of texts by path"),
        ({"files": {"a": 3}}, "column 'files': expected a mapping of texts by path, got 3"),
        ({"files": {"a": {"base64": "?"}}}, "column 'files'"),
        ({"workspace": {"imege": "x"}}, "column 'workspace': imege"),
        ({"workspace": "x"}, "column 'workspace'"),
    ],
)
def test_other_columns_are_not_the_models_doing(extra, text):
    """The error names the row and the column."""
    with pytest.raises(InfrastructureError, match=text):
        spec_of(**extra)
