"""Renders the templates of a plugin, and writes its files: all of them, or none."""

from __future__ import annotations

import json
import keyword
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from attrs import frozen
from jinja2 import Environment, PackageLoader, StrictUndefined

from turnwise.errors import ConfigError, PluginError
from turnwise.files import write_text
from turnwise.plugin.host import Host
from turnwise.plugin.registry import did_you_mean
from turnwise.plugin.requirements import GROUP as PLUGINS
from turnwise_testing.scaffold.kinds import KINDS, PartKind

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_DISTRIBUTION: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SHARED: Final = {
    "pyproject.toml": "pyproject.toml.jinja",
    "README.md": "README.md.jinja",
    ".gitignore": "gitignore.jinja",
    ".github/workflows/test.yml": "ci.yml.jinja",
    "src/{package}/__init__.py": "package.py.jinja",
}


@frozen(kw_only=True)
class Part:
    """
    A part to write.

    Attributes:
        kind: name of its kind, such as `agent`.
        name: registered name, which is also the name of the plugin and of the module.
        distribution: that has the module.
    """

    kind: str
    name: str
    distribution: str

    @property
    def class_name(self) -> str:
        """The name in the form of a class."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def package(self) -> str:
        """The import package of the distribution."""
        return self.distribution.replace("-", "_")


def check_part(kind: str, name: str, host: Host) -> PartKind:
    """
    Return the kind of a new part.

    Raises:
        ConfigError: the kind is unknown, or the name cannot be one.
        PluginError: the name is taken, or a package is missing that the part needs.
    """
    if kind not in KINDS:
        known = tuple(KINDS)
        hint = did_you_mean(kind, known)
        raise ConfigError(f"unknown kind {kind!r}{hint if 'mean' in hint else ''}; kinds: {', '.join(known)}")
    found = KINDS[kind]
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        better = "_".join(re.findall(r"[a-z0-9]+", name.lower())).lstrip("0123456789_")
        hint = f"; did you mean {better!r}?" if _NAME.fullmatch(better) and not keyword.iskeyword(better) else ""
        raise ConfigError(f"{name!r} is no name for a plugin: expected lower-case words, joined by underscores{hint}")
    if owner := _owner_of(found, name, host):
        raise PluginError(f"the {found.label} {name!r} is taken, by the plugin {owner!r}; choose another name")
    if name in (plugin.name for plugin in host.plugins):
        raise PluginError(f"a plugin {name!r} is installed already; choose another name, or uninstall it")
    module, extra = found.needs
    if module and find_spec(module) is None:
        raise PluginError(f"a {found.label} needs {module}; to install it: pip install 'turnwise[{extra}]'")
    return found


def create(part: Part, kind: PartKind, folder: Path) -> list[Path]:
    """
    Write a new distribution with one part, and return its files.

    Raises:
        ConfigError: the name of the distribution cannot be one, or the folder exists or cannot be made.
        PluginError: a distribution of this name is installed.
    """
    if not _DISTRIBUTION.fullmatch(part.distribution) or not part.package.isidentifier():
        raise ConfigError(f"{part.distribution!r} is no name for a distribution: expected words, joined by hyphens")
    if (installed := _version_of(part.distribution)) is not None:
        raise PluginError(f"{part.distribution} {installed} is installed already; choose another name")
    files = dict(_rendered(part, kind, {**_SHARED, **_part_templates(part)}))
    files[f"src/{part.package}/py.typed"] = ""
    try:
        if folder.exists():
            raise ConfigError(f"{folder} exists; to add a part to it: turnwise new {part.kind} NAME --into {folder}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Renamed at the end, so that an error or an interrupt leaves no half of a project.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            unfinished = Path(scratch, "new")
            for name, text in files.items():
                (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
                (unfinished / name).write_text(text, encoding="utf-8")
            shutil.move(unfinished, folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from error
    return [folder / name for name in sorted(files)]


def distribution_of(folder: Path) -> str:
    """Return the distribution in a folder that `create` wrote; `ConfigError` when there is none."""
    path = folder / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        distribution, points = str(project["name"]), project["entry-points"]
        known = isinstance(points, dict) and points.keys() & {kind.group for kind in KINDS.values()}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; --into expects the folder of a plugin") from error
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: expected a project with the section {_header(PLUGINS)}: {error}") from error
    package = folder / "src" / distribution.replace("-", "_")
    if not (package / "__init__.py").is_file() or not known:
        raise ConfigError(f"{path}: expected the package {package}; --into adds to plugins that turnwise new wrote")
    return distribution


def extend(part: Part, kind: PartKind, folder: Path) -> list[Path]:
    """
    Add a part to a distribution, and return the new and the changed files.

    Raises:
        ConfigError: a file of the part exists, or the project file cannot be extended.
    """
    files = dict(_rendered(part, kind, _part_templates(part)))
    for name in files:
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} exists; choose another name for the {kind.label}")
    project = folder / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    before = tomllib.loads(text)
    value, header = _entry_point(part, kind), _header(kind.group)
    line = f'{part.name} = "{value}"'
    found = before["project"]["entry-points"].get(kind.group, {})
    if found:
        extended = re.sub(rf"(?m)^{re.escape(header)}[^\n]*$", rf"\g<0>\n{line}", text, count=1)
    else:
        extended = f"{text.rstrip()}\n\n{header}\n{line}\n"
    # Read again, because a header may be written in other ways, which the pattern does not find.
    if tomllib.loads(extended)["project"]["entry-points"].get(kind.group) != {**found, part.name: value}:
        raise ConfigError(f"{project}: write {line} below {header} yourself")
    if kind.requires and kind.requires not in " ".join(before["project"].get("dependencies", ())):
        extended, count = re.subn(r"(?m)^dependencies = \[", rf'\g<0>"{kind.requires}", ', extended)
        if count != 1:
            raise ConfigError(f"{project}: write {kind.requires} into the dependencies yourself")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    write_text(project, extended)
    return [*(folder / name for name in sorted(files)), project]


def _part_templates(part: Part) -> Mapping[str, str]:
    return {
        f"src/{{package}}/{part.name}.py": f"{part.kind}.py.jinja",
        f"tests/test_{part.name}.py": f"{part.kind}_test.py.jinja",
    }


def _rendered(part: Part, kind: PartKind, templates: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the path of each file, relative to the project, and its text."""
    environment = Environment(
        loader=PackageLoader("turnwise_testing.scaffold"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    release = version("turnwise")
    major, minor, *_ = release.split(".")
    for path, template in templates.items():
        text = environment.get_template(template).render(
            name=part.name,
            package=part.package,
            distribution=part.distribution,
            class_name=part.class_name,
            kind=kind,
            header=_header(kind.group),
            entry_point=_entry_point(part, kind),
            usage=kind.usage.replace("NAME", part.name),
            version=f"{major}.{minor}",
            next_minor=f"{major}.{int(minor) + 1}",
        )
        yield path.format(package=part.package), text


def _header(group: str) -> str:
    return f"[project.entry-points.{group if group == PLUGINS else json.dumps(group)}]"


def _entry_point(part: Part, kind: PartKind) -> str:
    module = f"{part.package}.{part.name}"
    return module if kind.group == PLUGINS else f"{module}:{part.class_name}"


def _owner_of(kind: PartKind, name: str, host: Host) -> str:
    """Return the plugin that has a name already; empty when the name is free."""
    if kind.group == PLUGINS:
        # The name of a wrapper is that of its plugin.
        is_taken = kind.registry in host.kinds and name in host.registry(kind.registry)
        return host.entry(kind.registry, name).owner if is_taken else ""
    found = [each.dist.name if each.dist else each.value for each in entry_points(group=kind.group, name=name)]
    return found[0] if found else ""


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
