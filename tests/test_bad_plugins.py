"""A bad plugin breaks nothing else: every other command works, and the error names plugin and hint."""

import importlib
import json
import sys

import pytest

from turnwise.cli import main
from turnwise.config.resolve import build_part
from turnwise.errors import TurnwiseError
from turnwise.plugin.host import load
from turnwise.plugin.requirements import plugin_points
from turnwise.protocols import Resources
from turnwise_testing.whole_runs.installation import install_plugin

HEADER = "import turnwise\nfrom attrs import frozen\nfrom collections.abc import Callable\n"
COMMAND = """
class Command:
    help = "do a thing"
    def add_arguments(self, parser): ...
    def run(self, arguments): return 0

class Bad(Command):
    {body}

@turnwise.hookimpl
def register_commands(registry):
    registry.add("bad", lambda config, resources: Bad())
"""


def hook(kind: str, body: str, before: str = "") -> str:
    return f"{before}\n@turnwise.hookimpl\ndef register_{kind}(registry):\n    {body}\n"


BROKEN = {
    "missing module": ("import no_such_module_anywhere", "cannot be imported: ModuleNotFoundError"),
    "syntax": ("def broken(:", "cannot be imported: SyntaxError"),
    "exit at import": ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
    "error at import": ("1 / 0", "cannot be imported: ZeroDivisionError"),
    "wrong import": ("from turnwise import Nothing", "cannot be imported: ImportError"),
    "misspelt event": (
        "class O(turnwise.Observer):\n    def on_turn_finish(self, event): ...",
        "cannot be imported: TypeError: O.on_turn_finish would never be called: it is async, or of no event",
    ),
    "misspelt hook": (hook("agent", "pass"), "has an unknown hook 'register_agent'; did you mean 'register_agents'?"),
    "unmarked hook": ("def register_agents(registry): ...", "has a function 'register_agents' that is not marked"),
    "async hook": ("@turnwise.hookimpl\nasync def register_agents(registry): ...", "that is async or a wrapper"),
    "generator hook": (hook("agents", "yield"), "that is async or a wrapper"),
    "raising hook": (hook("agents", "raise KeyError('x')"), "that raised KeyError: 'x'"),
    "exiting hook": (hook("agents", "raise SystemExit(1)"), "that raised SystemExit: 1"),
    "renamed argument": ("@turnwise.hookimpl\ndef register_agents(config): ...", "write `def HOOK(registry)`"),
    "extra argument": ("@turnwise.hookimpl\ndef register_agents(registry, x): ...", "write `def HOOK(registry)`"),
    "no argument": ("@turnwise.hookimpl\ndef register_agents(): ...", "write `def register_agents(registry)`"),
    "empty name": (hook("agents", "registry.add('', print)"), "agent '': a name has letters"),
    "name with a space": (hook("agents", "registry.add('x agent!', print)"), "agent 'x agent!': a name has letters"),
    "name that is no text": (hook("agents", "registry.add(5, print)"), "agent 5: a name has letters"),
    "one name twice": (hook("agents", "[registry.add('x', print) for _ in 'ab']"), "agent 'x' is registered twice"),
    "config that is no class": (hook("agents", "registry.add('x', print, config=dict)"), "expected an attrs class"),
    "config with the field name": (
        hook("agents", "registry.add('x', print, config=C)", "@frozen\nclass C:\n    name: str = ''\n"),
        "expected an attrs class without a field 'name'",
    ),
    "enabled_if of an agent": (hook("agents", "registry.add('x', print, enabled_if=bool)"), "only an observer"),
}
UNBUILDABLE = {
    "factory that is a number": ("agents", "5", "cannot be built: TypeError"),
    "factory without arguments": ("agents", "lambda: None", "cannot be built: TypeError"),
    "raising factory": ("agents", "lambda c, r: 1 / 0", "cannot be built: ZeroDivisionError"),
    "error of the config": (
        "agents",
        "lambda c, r: (_ for _ in ()).throw(turnwise.errors.ConfigError('word: too long'))",
        ": word: too long",
    ),
    "nothing": ("agents", "lambda c, r: None", "its factory returned NoneType, which has no step"),
    "agent without step": ("agents", "lambda c, r: object()", "its factory returned object, which has no step"),
    "reward without score": ("rewards", "lambda c, r: 5", "its factory returned int, which has no score"),
    "router without release": ("routers", "lambda c, r: 5", "its factory returned int, which has no choose, release"),
    "engine": ("engines", "lambda c, r: 5", "its factory returned int, which has no abort, capabilities, generate"),
    "observer without the base class": ("observers", "lambda c, r: 5", "its factory returned int; expected"),
    "transport": ("weight_transports", "lambda c, r: 5", "which has no apply, close, publish"),
    "postprocessor": ("postprocessors", "lambda c, r: 5", "which has no process"),
    "interaction": ("interactions", "lambda c, r: 5", "which has no create, release, respond"),
    "config of an unknown type": ("agents", "print, config=Odd", "cannot be read from a config"),
    "config with an unknown annotation": ("agents", "print, config=Unresolved", "cannot be resolved"),
}
COMMANDS = {
    "add_arguments raises": (
        "def add_arguments(self, parser): raise KeyError('x')",
        2,
        "cannot be used: KeyError",
    ),
    "no help": ("help = property(lambda self: self.nothing)", 2, "cannot be used: AttributeError"),
    "help with a percent sign": ("help = 'measure 100 %d'", 0, ""),
    "run raises": (
        "def run(self, arguments): raise KeyError('x')",
        1,
        "command 'bad' of plugin 'bad_kit' of bad-kit",
    ),
    "run returns nothing": ("def run(self, arguments): ...", 1, "run returned None, expected an exit code"),
}
ODD = """
@frozen
class Odd:
    value: Callable = print

@frozen
class Unresolved:
    value: "Nope" = None
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of `sys.path` for the bad plugin, whose only neighbour is the core's own; it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def two_plugins():
        return [point for point in plugin_points() if point.name in ("bad_kit", "builtins")]

    monkeypatch.setattr("turnwise.plugin.host.plugin_points", two_plugins)
    yield tmp_path
    sys.modules.pop("bad_kit", None)


def install(site, code: str) -> None:
    install_plugin(site, "bad_kit", HEADER + code)
    importlib.invalidate_caches()


def check_other_commands(capsys, state: str) -> dict:
    """Run the commands that everybody needs, and return the row of the bad plugin."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "plugins" in capsys.readouterr().out
    assert main(["plugins"]) == 0
    capsys.readouterr()
    assert main(["plugins", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["plugins"]}
    assert rows["builtins"]["state"] == "ok"
    assert rows["bad_kit"]["state"] == state
    return rows["bad_kit"]


@pytest.mark.many_cases
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin(site, capsys, case):
    """It is listed with the reason; a run that lists it fails with the hint."""
    code, reason = BROKEN[case]
    install(site, code)
    row = check_other_commands(capsys, "broken")
    assert reason in row["error"]
    assert row["registers"] == {}


@pytest.mark.parametrize("case", UNBUILDABLE)
def test_a_part_that_cannot_be_built(site, capsys, case):
    """Only a run that names the part fails, and the error names part, plugin and distribution."""
    kind, factory, reason = UNBUILDABLE[case]
    install(site, hook(kind, f"registry.add('bad', {factory})", ODD))
    check_other_commands(capsys, "ok")
    with pytest.raises(TurnwiseError) as caught:
        build_part(load(), kind, "bad", Resources(), path="here")
    text = str(caught.value)
    assert reason in text
    assert "'bad' of plugin 'bad_kit' of bad-kit 1.0 (module bad_kit)" in text
    assert "\n" not in text


@pytest.mark.parametrize("case", COMMANDS)
def test_a_bad_command(site, capsys, case):
    """Every other command works, and the error of the bad one names its plugin."""
    body, code, reason = COMMANDS[case]
    install(site, COMMAND.format(body=body))
    check_other_commands(capsys, "ok")
    assert main(["bad"]) == code
    assert reason in capsys.readouterr().err


def test_an_unmet_requirement_is_listed(site, capsys):
    """`turnwise plugins` shows the command that installs it."""
    install(site, "")
    [info] = site.glob("*.dist-info")
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: no-such-package>=2\n")
    row = check_other_commands(capsys, "ok")
    hint = "pip install 'no-such-package>=2'"
    assert row["unmet_requirements"] == [f"no-such-package>=2, and it is not installed: {hint}"]
