"""The plugin system: hook specifications, registries, discovery."""
