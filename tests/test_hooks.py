"""Every hook has a complete docstring, and works for an installed plugin."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import turnwise
from turnwise import PluginRecipe, Resources
from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part
from turnwise.errors import DuplicateNameError, PluginError
from turnwise.plugin import specs as hookspecs
from turnwise.plugin.host import KINDS, Host, load
from turnwise.plugin.wrapping import WRAPPED, noun_of
from turnwise_testing.whole_runs.installation import install_plugin

ROOT = Path(__file__).parents[1]
EVERYTHING = Path(__file__).with_name("turnwise_everything.py")
SLOT = re.compile(r"^([A-Z][\w ]*):", re.MULTILINE)
SPECS = {
    node.name: node
    for node in ast.parse(inspect.getsource(hookspecs)).body
    if isinstance(node, ast.FunctionDef)
    and any(ast.unparse(each).startswith("hookspec") for each in node.decorator_list)
}


REGISTERING = [name for name in SPECS if name.startswith("register_")]
"""The hooks that get a registry."""
WRAPPING = [name for name in SPECS if name.startswith("wrap_")]
"""The hooks that get a part."""


@pytest.fixture(params=REGISTERING)
def hook(request: pytest.FixtureRequest) -> str:
    """The name of each hook that registers parts, in turn."""
    return str(request.param)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, whose modules are unloaded afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def host(site: Path) -> Host:
    """A host with the plugin that uses every hook."""
    install_plugin(site, "turnwise_everything", EVERYTHING.read_text(encoding="utf-8"), entry="everything")
    return load(PluginRecipe(allow=("everything",)))


def docstring_of(hook: str) -> str:
    """Return the docstring of a hook."""
    return inspect.cleandoc(ast.get_docstring(SPECS[hook]) or "")


def test_there_is_a_registry_for_every_hook() -> None:
    """The specifications and the host name the same kinds."""
    assert sorted(REGISTERING) == sorted(f"register_{kind}" for kind in KINDS)


def test_every_hook_that_wraps_is_typed() -> None:
    """A hook gets a part and the run, and returns a part of the same protocol or None: nothing is `Any`."""
    assert sorted(WRAPPING) == sorted(f"wrap_{noun_of(kind)}" for kind in WRAPPED)
    assert {*SPECS} == {*REGISTERING, *WRAPPING, "add_hookspecs", "config_section"}
    for name in WRAPPING:
        function = getattr(hookspecs, name)
        part, run, result = get_type_hints(function).values()
        assert list(inspect.signature(function).parameters) == [name.removeprefix("wrap_"), "run"]
        assert (run, result) == (turnwise.RunInfo, part | None)
        kind = next(kind for kind in WRAPPED if f"wrap_{noun_of(kind)}" == name)
        assert get_args(get_type_hints(getattr(hookspecs, f"register_{kind}"))["registry"])[0] in (
            part,
            part | tuple[part, ...],
        )


def test_hooks_are_documented() -> None:
    """The reference renders the module of the specifications, so it shows every hook with its exact signature."""
    page = (ROOT / "docs/reference/hooks.md").read_text(encoding="utf-8")

    assert f"\n::: {hookspecs.__name__}\n" in page


@pytest.mark.parametrize("hook", SPECS)
def test_docstring_has_its_slot(hook: str) -> None:
    """One line of meaning, then the thing to avoid."""
    meaning, _, slots = docstring_of(hook).partition("\n\n")

    assert re.fullmatch(r"[A-Z][^\n]*\.", meaning)
    assert SLOT.findall(slots) == ["Do not"]
    assert re.search(r"^Do not: \S", slots, re.MULTILINE)


def test_module_docstring_has_the_common_slots() -> None:
    """The rules of all hooks are written once, each with a text."""
    text = inspect.getdoc(hookspecs) or ""

    assert SLOT.findall(text) == ["When", "Do", "Errors", "Example"]
    assert re.findall(r"^[A-Z][\w ]*: *$", text, re.MULTILINE) == []


def test_example_registers(hook: str, site: Path) -> None:
    """The example of the module is a plugin, for every hook: with its names defined, it registers one entry."""
    example = textwrap.dedent((inspect.getdoc(hookspecs) or "").partition("Example::\n")[2])
    ((written, name, factory, config),) = re.findall(
        r'def (\w+)\(registry\):\s+registry\.add\("(\w+)", (\w+), config=(\w+)\)', example
    )
    defined = f"@attrs.frozen\nclass {config}:\n    pass\n\ndef {factory}(config, resources):\n    return object()\n"
    install_plugin(
        site,
        "turnwise_example",
        f"import attrs\nimport turnwise\n{defined}\n{example.replace(written, hook)}",
        entry="example",
    )

    found = load(PluginRecipe(allow=("example",))).registry(hook.removeprefix("register_"))  # type: ignore[arg-type]

    assert [each.owner for each in found.entries().values() if each.name == name] == ["example"]


def test_plugin_registers_through_every_hook(host: Host) -> None:
    """One installed plugin fills every registry of the host, and the list of plugins says so."""
    (plugin,) = [each for each in host.plugins if each.name == "everything"]

    assert plugin.state == "ok"
    assert plugin.version == "1.0"
    assert plugin.registers == {kind: (f"silent_{kind.removesuffix('s')}",) for kind in KINDS}


def test_registered_parts_are_built(hook: str, host: Host) -> None:
    """The factory receives the options and the run's resources, and its product implements the protocol."""
    kind = hook.removeprefix("register_")
    resources = Resources(seed=7)
    hint = get_type_hints(getattr(hookspecs, hook))["registry"]

    part = build_part(host, kind, Choice(f"silent_{kind.removesuffix('s')}", {"size": 3}), resources)  # type: ignore[arg-type]

    assert isinstance(part, get_args(hint)[0])
    assert part.options.size == 3


def test_two_plugins_may_not_share_a_name(site: Path) -> None:
    """A conflict names the kind, the name and both owners."""
    code = EVERYTHING.read_text(encoding="utf-8")
    install_plugin(site, "turnwise_everything", code, entry="everything")
    install_plugin(site, "turnwise_again", code, entry="again")

    host = load(PluginRecipe(allow=("everything", "again")))
    with pytest.raises(DuplicateNameError, match=r"agent 'silent_agent'.*'again' and 'everything'"):
        host.entry("agents", "silent_agent")


def test_a_misspelled_hook_is_refused(site: Path) -> None:
    """A plugin with an unknown hook is refused with a suggestion."""
    install_plugin(
        site,
        "turnwise_typo",
        "import turnwise\n@turnwise.hookimpl\ndef register_engine(registry):\n    pass\n",
        entry="typo",
    )

    with pytest.raises(PluginError, match=r"unknown hook 'register_engine'; did you mean 'register_engines'"):
        load(PluginRecipe(allow=("typo",)))


def test_the_marker_is_public() -> None:
    """Plugins mark hooks with `turnwise.hookimpl` and need no pluggy."""
    assert turnwise.hookimpl is hookspecs.hookimpl


def test_the_fake_uses_the_public_api() -> None:
    """The plugin of these tests imports public modules only."""
    imported = {
        node.module
        for node in ast.walk(ast.parse(EVERYTHING.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("turnwise")
    }

    assert imported == {"turnwise", "turnwise.protocols", "turnwise.protocols.weights"}
