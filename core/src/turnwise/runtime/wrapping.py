"""Wraps the parts of a run, by the hooks of the plugins that its config enables."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TypeVar

from attrs import define, evolve, field

from turnwise.config.file import to_dict
from turnwise.config.own_code import OwnCode
from turnwise.config.resolve import build_part
from turnwise.config.run import RunConfig
from turnwise.config.sections import enabled_plugins, section_choices
from turnwise.config.structuring import structure
from turnwise.errors import WrapperError
from turnwise.plugin.host import Host
from turnwise.protocols import Resources, RunInfo
from turnwise.protocols.wrapper import Role

T = TypeVar("T")


@define(eq=False)
class PartWrapper:
    """
    Calls the hooks `wrap_*` of a run in this process; builds the plugins' sections once, for the first part.

    Attributes:
        config: of the run, resolved.
        host: the loaded plugins.
        code: the user's own code that the run may use.
        resources: of the parts in sections: the model and the seed.
        role: of this process.
    """

    config: RunConfig
    host: Host
    code: OwnCode
    resources: Resources
    role: Role
    _sections: dict[str, object] = field(factory=dict, init=False)

    def wrap(self, kind: str, part: T, resources: Resources) -> T:
        """Return a part of a registry inside of its wrappers; the part itself if it has none."""
        for plugin in self.plugins(kind):
            run = evolve(self._run, section=self.section(plugin), resources=resources)
            contract = self.host.registry(kind).contract or object
            try:
                part = self.host.wrapping.wrap(plugin, kind, part, contract, run)
            except WrapperError as error:
                hint = f"remove the section {plugin!r}, and leave it out of plugins"
                raise WrapperError(f"{error}; to continue without it, {hint}") from error
        return part

    def plugins(self, kind: str) -> tuple[str, ...]:
        """Return the enabled plugins that wrap parts of a registry, the innermost first."""
        found = self.host.wrapping.plugins(kind)
        enabled = enabled_plugins(self.config, self.host) if found else ()
        return tuple(name for name in found if name in enabled)

    def section(self, plugin: str) -> object:
        """Return the section of a plugin: an object of its class, or the built parts."""
        if plugin not in self._sections:
            self._sections[plugin] = self._build(plugin)
        return self._sections[plugin]

    def owners_in_replicas(self) -> Iterable[str]:
        """Yield the plugins that a replica needs besides its engine's: of wrappers, and of parts in their sections."""
        for plugin in self.plugins("engines"):
            section = self.host.sections[plugin]
            if section.in_replicas is None or section.in_replicas(self.section(plugin)):
                yield plugin
                for choice in section_choices(self.config.sections.get(plugin, []), plugin) if section.kind else ():
                    if not choice.is_own_code:
                        yield self.host.entry(section.kind, choice.name).owner

    def _build(self, plugin: str) -> object:
        section, given = self.host.sections[plugin], self.config.sections
        if not section.kind:
            return structure(given.get(plugin, {}), section.options, path=plugin, base_dir=self.config.base_dir)
        choices = enumerate(section_choices(given.get(plugin, []), plugin))
        return tuple(
            build_part(self.host, section.kind, choice, self.resources, path=f"{plugin}.{index}", code=self.code)
            for index, choice in choices
        )

    @cached_property
    def _run(self) -> RunInfo:
        return RunInfo(config=to_dict(self.config), role=self.role)
