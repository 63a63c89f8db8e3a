"""Tools of a run: registered tools, functions and classes from a config or a tools file."""

import asyncio
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from attrs import frozen

from turnwise.config.own_code import OwnCode
from turnwise.config.parts import ToolChoice
from turnwise.config.structuring import structure
from turnwise.errors import ConfigError
from turnwise.plugin import requirements
from turnwise.plugin.host import Host, load
from turnwise.protocols import Resources, Tool
from turnwise.runtime.tools import build_tools, read_tools_file
from turnwise.tools.toolbox import ToolBox
from turnwise.types import PluginRecipe, Task, ToolCall, ToolResult


def schema_of(parameters: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def call_once(tool: Tool, **arguments: Any) -> ToolResult:
    async def run() -> ToolResult:
        async with ToolBox([tool]).session(Task(messages=({"role": "user", "content": "hi"},), uid="t")) as session:
            return await session.call(ToolCall(name=tool.schema["function"]["name"], arguments=arguments))

    return asyncio.run(run())


class Probe:
    """A tool that answers `ok`."""

    def __init__(self, name: str) -> None:
        self.schema = schema_of({"type": "object", "properties": {"x": {"type": "integer"}}}, name)

    async def create(self, task: Task) -> object: ...

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(text="ok")

    async def release(self, session: object) -> float | None: ...


@frozen
class ProbeOptions:
    """Options of the registered tool of these tests."""

    label: str = "registered"
    size: int = 1


@pytest.fixture
def host() -> Host:
    host = load(PluginRecipe(allow=("plain_functions",)))
    host.registry("tools").add("probe", lambda config, _resources: Probe(config.label), config=ProbeOptions)
    host.registry("tools").add("broken", lambda _config, _resources: 1 / 0)
    return host


@pytest.fixture
def own_tools(tmp_path, monkeypatch) -> None:
    """A package of the user's own, importable as `own_tools`."""
    package = tmp_path / "own_tools"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "maths.py").write_text(
        textwrap.dedent('''
        from os import getenv
        from turnwise_plain_functions import tool

        def add(a: int, b: int) -> int:
            """Add up."""
            return a + b

        @tool
        def double(a: int) -> int:
            """Double it."""
            return 2 * a

        def untyped(a):
            return a

        class Counter:
            def __init__(self, start: int = 0):
                self.start = start
            @property
            def schema(self):
                return {"type": "function", "function": {"name": "counter", "parameters": {"type": "object"}}}
            async def create(self, task): return None
            async def execute(self, session, arguments): ...
            async def release(self, session): return None

        class NoTool:
            schema = {}
        ''')
    )
    (package / "failing.py").write_text("raise OSError('no licence')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("own_tools")]:
        del sys.modules[name]


@pytest.mark.usefixtures("own_tools")
class TestLoading:
    """Tools from a config."""

    def load(self, host: Host, *entries: object, allowed: Sequence[str] = ("own_tools",)) -> Any:
        structured = structure(list(entries), tuple[ToolChoice, ...], path="tools")
        return build_tools(structured, host, Resources(), OwnCode(modules=tuple(allowed)))

    def test_every_kind_of_entry(self, host):
        """Registered names, functions, decorated functions and classes, in order."""
        tools = self.load(
            host,
            "probe",
            {"name": "probe"} | {"schema": schema_of({"type": "object"}, "renamed")},
            {"name": "own_tools.maths:add"},
            {"name": "own_tools.maths:double"},
            {"name": "own_tools.maths:Counter", "start": 4},
        )
        assert list(tools) == ["registered", "renamed", "add", "double", "counter"]
        assert call_once(tools["add"], a=1, b=2).text == "3"
        assert call_once(tools["double"], a=2).text == "4"
        assert tools["counter"].start == 4

    def test_options_reach_a_registered_tool(self, host):
        """Options become an object of the tool's config class."""
        assert list(self.load(host, {"name": "probe", "label": "ready"})) == ["ready"]

    def test_an_entry_may_replace_the_schema_of_any_tool(self, host):
        """The model sees this schema, and arguments are checked against it."""
        one = schema_of({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, "one")
        for entry in (
            {"name": "probe"},
            {"name": "own_tools.maths:untyped"},
            {"name": "own_tools.maths:double"},
            {"name": "own_tools.maths:Counter"},
        ):
            tools = self.load(host, {**entry, "schema": one})
            assert tools["one"].schema == one
            assert call_once(tools["one"], a=2).error
        assert call_once(self.load(host, {"name": "own_tools.maths:double", "schema": one})["one"], a=1).text == "2"

    @pytest.mark.parametrize(
        ("entry", "text"),
        [
            ("prob", "tool 'prob': unknown tool 'prob'; did you mean 'probe'?"),
            ("broken", "tool 'broken': tools: tool 'broken' of plugin '' cannot be built: ZeroDivisionError"),
            ({"name": "probe", "sizes": 1}, "tool 'probe': sizes: unknown key; did you mean 'size'?"),
            ({"name": "os:getenv"}, "module 'os' is not allowed; list it in modules, which holds own_tools"),
            ({"name": "own_toolsy.a:B"}, "module 'own_toolsy.a' is not allowed"),
            ({"name": "own_tools.maths:getenv"}, "module 'os' is not allowed"),
            (
                {"name": "own_tools.maths:ad"},
                "tool 'own_tools.maths:ad': there is no 'ad'; did you mean",
            ),
            ({"name": "own_tools.none:f"}, "cannot be imported: No module named 'own_tools.none'"),
            ({"name": "own_tools.failing:f"}, "cannot be imported: OSError: no licence"),
            ({"name": "own_tools.maths:untyped"}, "tool 'untyped': parameter 'a' has no type annotation"),
            ({"name": "own_tools.maths:add", "start": 1}, "tool 'own_tools.maths:add': start: unknown key"),
            ({"name": "own_tools.maths:Counter", "stop": 1}, "unexpected keyword argument 'stop'"),
            (
                {"name": "own_tools.maths:NoTool"},
                "it is NoTool, which has no create, execute, release; expected turnwise.Tool",
            ),
            ({"name": "probe", "schema": {"type": "function"}}, "tool 'probe': its schema must have the form"),
        ],
    )
    def test_an_entry_that_cannot_be_built_has_one_line(self, host, entry: object, text: str):
        """The line names the tool and the problem."""
        with pytest.raises(ConfigError) as caught:
            self.load(host, entry)
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_without_an_adapter_the_error_names_the_package(self, monkeypatch):
        """A core without plugins cannot make a tool of a function, and says which package can."""
        found = requirements.distributions
        monkeypatch.setattr(requirements, "distributions", lambda name: found(name=name) if name == "turnwise" else [])
        with pytest.raises(ConfigError) as caught:
            self.load(Host(), {"name": "own_tools.maths:add"})
        text = str(caught.value)
        assert text.startswith("tool 'own_tools.maths:add': no adapter makes a tool of a function")
        assert text.endswith("; to install it: pip install 'turnwise-plain-functions'")

    def test_two_tools_of_one_name_are_rejected(self, host):
        """Names come from schemas, so two entries may collide."""
        with pytest.raises(ConfigError, match="two tools are named 'registered'"):
            self.load(host, "probe", "probe")

    def test_nothing_is_allowed_unless_listed(self, host):
        """The error says how to allow it, and the module is not imported."""
        with pytest.raises(ConfigError, match="list it in modules, which holds nothing"):
            self.load(host, {"name": "own_tools.maths:add"}, allowed=())
        assert "own_tools.maths" not in sys.modules

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ("tools: 3", "tools: expected a list, got 3"),
            ("tools: probe", "tools: expected a list, got 'probe'"),
            ("tool: []", "tools: missing"),
            ("tools: [3]", "tools.0: expected a name, or a section"),
            ("tools: [a, {}]", "tools.1.name: missing; the section has only no keys"),
            ("tools: [{name: 3}]", "tools.0.name: expected text, got 3"),
            ("tools: ['m:f.g']", "tools.0.name: must be a registered name, 'package.module:Name' or"),
            ("tools: [{name: a, schema: 3}]", "tools.0.schema: expected a section of keys, got 3"),
        ],
    )
    def test_a_bad_file_has_one_line(self, tmp_path, content: str, text: str):
        """The line names the file and the entry."""
        file = tmp_path / "tools.yaml"
        file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            read_tools_file(file)
        assert any(line.startswith(f"{file}: {text}") for line in str(caught.value).splitlines()), caught.value

    def test_a_file_holds_the_entries_of_a_config(self, tmp_path):
        """The section `tools` of a config and a tools file have one form."""
        file = tmp_path / "tools.yaml"
        file.write_text("tools: [{name: 'a.b:C', x: 1, schema: {type: function}}, {name: probe, size: 2}]")
        first, second = read_tools_file(file)
        assert ToolChoice("a.b:C", {"x": 1}, {"type": "function"}) == first
        assert ToolChoice("probe", {"size": 2}) == second

    def test_a_file_of_verl_is_taken_as_it_is(self, tmp_path):
        """Entries with `class_name` go to the tools `verl`, with the run's modules; files are no modules of verl."""
        file = tmp_path / "tools.yaml"
        file.write_text("tools: [{class_name: a.b.C, config: {type: native}, tool_schema: {type: function}}]")
        expected = ToolChoice("verl", {"file": str(file), "modules": ["verl", "a.b"]})
        assert read_tools_file(file, ("a.b", "./own.py")) == (expected,)

    def test_a_mixed_file_has_one_line(self, tmp_path):
        """An entry of verl beside one of ours has no reader; the line says where verl's file is named."""
        file = tmp_path / "tools.yaml"
        file.write_text("tools: [probe, {class_name: a.b.C}]")
        with pytest.raises(ConfigError, match=r"tools\.1: an entry with class_name; write all such entries to a file"):
            read_tools_file(file)
