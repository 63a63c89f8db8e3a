"""Builds the declarations of the open columns that installed plugins make."""

from __future__ import annotations

from turnwise.errors import PluginError, describe
from turnwise.plugin.host import Host
from turnwise.protocols import Resources
from turnwise.record.column_specs import ColumnSpec, check_open


def build_columns(host: Host, resources: Resources) -> dict[str, ColumnSpec]:
    """
    Return the declared columns by name, each built with the default options.

    Raises:
        PluginError: a factory raised or returned something else, or a name is taken.
        DuplicateNameError: two plugins declare a column.
    """
    registry = host.registry("columns")
    found: dict[str, ColumnSpec] = {}
    for name in registry.names():
        entry = registry.get(name)
        where = f"column {name!r} of plugin {entry.owner!r}"
        try:
            spec = entry.factory(entry.config(), resources)
            registry.check(spec)
            check_open(spec)
        except Exception as error:
            raise PluginError(f"{where}: {describe(error)}") from error
        if spec.name != name:
            raise PluginError(f"{where} declares the name {spec.name!r}; expected the name that it is registered with")
        found[name] = spec
    return found
