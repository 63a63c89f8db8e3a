"""Runs the diagnoses that the plugins of this interpreter register."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from attrs import frozen

from turnwise.errors import describe
from turnwise.plugin.host import Host, LoadedPlugin
from turnwise.plugin.registry import Entry, did_you_mean
from turnwise.protocols import Diagnostic, Finding, Resources

_OWN: Final = "doctor"
"""Entry-point name of this plugin, whose diagnostics come first."""


@frozen(kw_only=True)
class Diagnosis:
    """
    The findings of one diagnostic.

    Attributes:
        name: name of the diagnostic, of a plugin that cannot be imported, or a name that no plugin knows.
        plugin: entry-point name of the plugin; empty for an unknown name.
        findings: at least one.
    """

    name: str
    plugin: str
    findings: tuple[Finding, ...]


def diagnose(host: Host, names: Collection[str] = ()) -> list[Diagnosis]:
    """
    Run the diagnostics of a host, this plugin's first, and report plugins that cannot be imported.

    Args:
        host: with the plugins to ask.
        names: names of diagnostics or of plugins; empty runs all. An unknown name becomes a finding.
    """
    entries = sorted(
        host.registry("diagnostics").entries().values(), key=lambda entry: (entry.owner != _OWN, entry.name)
    )
    found = [_run(entry) for entry in entries if not names or {entry.name, entry.owner} & set(names)]
    found += [_broken(plugin) for plugin in host.broken if not names or plugin.name in names]
    answered = {name for each in found for name in (each.name, each.plugin)}
    return found + [_unknown(host, name) for name in names if name not in answered]


def _run(entry: Entry[Diagnostic]) -> Diagnosis:
    findings: list[Finding] = []
    try:
        findings.extend(_checked(entry.factory(entry.config(), Resources())))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one plugin's failure must not hide the others' findings
        explanation = f"the diagnosis of plugin {entry.owner!r} raised {describe(error)}"
        findings.append(Finding(entry.name, "broken", explanation))
    return Diagnosis(name=entry.name, plugin=entry.owner, findings=tuple(findings))


def _checked(diagnostic: Diagnostic) -> Iterator[Finding]:
    empty = True
    for finding in diagnostic.diagnose():
        if not isinstance(finding, Finding):
            raise TypeError(f"expected a turnwise.Finding, got {finding!r}")
        yield finding
        empty = False
    if empty:
        raise ValueError("no finding")


def _broken(plugin: LoadedPlugin) -> Diagnosis:
    hint = f"pip install --force-reinstall {plugin.distribution}"
    finding = Finding(plugin.name, "broken", f"{plugin.source} cannot be imported: {plugin.error}", hint)
    return Diagnosis(name=plugin.name, plugin=plugin.name, findings=(finding,))


def _unknown(host: Host, name: str) -> Diagnosis:
    explanation = (
        f"no loaded plugin registers a diagnosis of this name{did_you_mean(name, host.registry('diagnostics').names())}"
    )
    if name in host.skipped:
        explanation = "the plugin is installed, but the variable TURNWISE_PLUGINS leaves it out"
    finding = Finding(
        name, "missing", explanation, "install the plugin; the page Packages of the documentation lists all"
    )
    return Diagnosis(name=name, plugin="", findings=(finding,))
