"""
The user's own code as parts: objects that a config names by their place, and objects that a program passes.

A place is `package.module:Name` or `./file.py:Name`. Only modules and files that the config's `modules` lists are
imported: neither a data file nor a name in a config alone may run code.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypedDict

import attrs
from attrs import evolve, field, frozen

from turnwise.config.parts import FILE_END, GIVEN, Choice, Options, ToolChoice
from turnwise.config.run import RunConfig
from turnwise.config.structuring import structure
from turnwise.errors import ConfigError, PluginError, TurnwiseError, describe
from turnwise.events.observer import Observer
from turnwise.files import expanded
from turnwise.plugin.host import Host
from turnwise.plugin.registry import did_you_mean
from turnwise.protocols import Resources

_FILES: Final[dict[Path, tuple[int, ModuleType]]] = {}
"""The imported files with their times of change, so that all parts of a file share one module."""


class OwnParts(TypedDict, total=False):
    """
    Parts that a program passes to a run; they replace the parts of its config, and observers come in addition.

    Each is an object that fulfils its protocol, a function, a class, or a name as in a config. None removes a part.
    """

    observers: Iterable[Observer]

    agent: object
    reward: object | None
    group_reward: object | None
    interaction: object | None
    tools: Iterable[object]
    postprocessors: Iterable[object]


def place_parts(config: RunConfig, parts: OwnParts) -> tuple[RunConfig, dict[str, object]]:
    """Return a config that names the parts of a program, and those of them that are objects by these names."""
    given: dict[str, object] = {}

    def name_of(part: object) -> str:
        if isinstance(part, str):
            return part
        label = f"{GIVEN}{getattr(part, '__name__', type(part).__name__)}"
        name = f"{label} {len(given) + 1}" if label in given else label
        given[name] = part
        return name

    changes: dict[str, Any] = {}
    for key, value in parts.items():
        make = ToolChoice if key == "tools" else Choice
        if key not in ("observers", "postprocessors", "tools"):
            changes[key] = None if value is None else make(name_of(value))
        elif not isinstance(value, Iterable) or isinstance(value, str):
            raise ConfigError(f"{key}: expected a list of parts, got {value!r}")
        elif key != "observers":
            changes[key] = tuple(make(name_of(part)) for part in value)
    return evolve(config, **changes), given


@frozen(kw_only=True)
class OwnCode:
    """
    The user's own code that a run may use.

    Attributes:
        modules: modules and packages, with everything in them, and files.
        base_dir: folder that the places of files start from.
        given: objects that a program passes, by their names.
    """

    modules: tuple[str, ...] = ()
    base_dir: Path = field(factory=Path)
    given: Mapping[str, object] = field(factory=dict)

    def check_allowed(self, place: str, where: str = "") -> None:
        """Raise `ConfigError` unless `modules` lists the module or the file of a place."""
        home, _, _ = place.rpartition(":")
        if home.endswith(FILE_END):
            files = (self._locate(each) for each in self.modules if each.endswith(FILE_END))
            allowed, noun = self._locate(home) in files, "file"
        else:
            allowed, noun = any(home == each or home.startswith(f"{each}.") for each in self.modules), "module"
        if not allowed and not place.startswith(GIVEN):
            listed = ", ".join(self.modules) or "nothing"
            raise ConfigError(f"{where}{noun} {home!r} is not allowed; list it in modules, which holds {listed}")

    def find(self, place: str) -> Any:
        """
        Return the object at a place.

        Raises:
            ConfigError: the place is not allowed, cannot be imported or does not have the name.
        """
        if place.startswith(GIVEN):
            if place not in self.given:
                raise ConfigError("a Python program passed this object: pass it to RolloutManager.from_config again")
            return self.given[place]
        self.check_allowed(place)
        home, _, name = place.rpartition(":")
        module = _import_file(self._locate(home)) if home.endswith(FILE_END) else self._import(home)
        if not hasattr(module, name):
            public = tuple(each for each, value in vars(module).items() if callable(value) and not each.startswith("_"))
            raise ConfigError(f"there is no {name!r}{did_you_mean(name, public)}")
        found = getattr(module, name)
        # An allowed module has names of other modules, such as os.system, which the user has not allowed.
        code = inspect.unwrap(found)
        if inspect.isroutine(code) or inspect.isclass(code):
            self.check_allowed(f"{code.__module__ or module.__name__}:{name}")
        return found

    def find_any(self, place: str) -> Any:
        """
        Return the object at a place that an option of a part names; arguments and errors as in `find`.

        A module need not be allowed: the option is set in the config, and the module is installed or on the path.
        """
        home, _, name = place.rpartition(":")
        if not home.endswith(FILE_END):
            module = self._import(home)
            if not hasattr(module, name):
                public = tuple(each for each in vars(module) if not each.startswith("_"))
                raise ConfigError(f"module {home} has no {name!r}{did_you_mean(name, public)}")
            return getattr(module, name)
        return self.find(place)

    def _locate(self, file: str) -> Path:
        return (self.base_dir / expanded(file)).resolve()

    def _import(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The folder is not added to the path: each file in it could replace a library, in every process of the run.
            beside = any((self.base_dir / f"{error.name}{end}").exists() for end in ("", FILE_END))
            hint = f"; a file beside the config is found by ./FILE.py:NAME, or with PYTHONPATH={self.base_dir}"
            raise ConfigError(f"cannot be imported: {error}{hint if beside else ''}") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(f"cannot be imported: {describe(error)}") from error


def _import_file(path: Path) -> ModuleType:
    """Return a file as a module whose name is the path; it is imported again after a change."""
    try:
        changed_ns = path.stat().st_mtime_ns
        if path in _FILES and _FILES[path][0] == changed_ns:
            return _FILES[path][1]
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from error
    loader = SourceFileLoader(str(path), str(path))
    module = ModuleType(str(path))
    # Without a package: a relative import then fails by that name, and not for want of a module "/FOLDER/NAME".
    module.__file__, module.__loader__, module.__package__ = str(path), loader, ""
    sys.modules[str(path)] = module  # dataclasses and attrs look for the module of a class there
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[str(path)]
        raise ConfigError(f"cannot be imported: {describe(error)}") from error
    _FILES[path] = changed_ns, module
    return module


def build_own(host: Host, kind: str, choice: Choice, resources: Resources, path: str, code: OwnCode) -> object:
    """
    Build a part of the user's own code.

    A class with an attrs class `Config` inside is called with that config and the resources, as plugins are. Another
    class takes the options as keyword arguments, and the resources if it has a parameter of that name. An object that
    fulfils the protocol of its kind is used as it is; of others, such as functions, adapters make parts.

    Raises:
        ConfigError, PluginError: lines that name the place of the choice in the config, and the place of the code.
    """
    where = f"{path}: {choice.name}" if path else choice.name
    try:
        found = code.find(choice.name)
        if inspect.isclass(found):
            part = _instance(found, choice.options, resources, code.base_dir)
        else:
            part = _adapted(host, kind, found, choice, resources)
    except (ConfigError, PluginError) as error:
        lines = [f"{where}: {line}" for line in str(error).splitlines()]
        raise type(error)("\n".join(lines)) from error
    except TurnwiseError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} cannot be built: {describe(error)}") from error
    if mismatch := host.registry(kind).mismatch(part):
        raise ConfigError(f"{where}: it is {mismatch}")
    return part


def _instance(found: type, options: Options, resources: Resources, base_dir: Path) -> object:
    config = getattr(found, "Config", None)
    if inspect.isclass(config) and attrs.has(config):
        return found(structure(options, config, base_dir=base_dir), resources)
    signature = inspect.signature(found)
    given: dict[str, object] = {"resources": resources} if "resources" in signature.parameters else {}
    keywords = {**given, **options}
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ConfigError(f"its options do not fit {signature}: {error}") from error
    return found(**keywords)


def _adapted(host: Host, kind: str, found: object, choice: Choice, resources: Resources) -> object:
    registry = host.registry(kind)
    fits = not registry.mismatch(found)
    if fits and not choice.options:
        return found
    schema = {"schema": choice.schema} if isinstance(choice, ToolChoice) and choice.schema is not None else {}
    for entry in host.registry("adapters").entries().values():
        part = entry.factory(entry.config(), resources).adapt(kind, found, {**choice.options, **schema})
        if part is not None:
            return part
    if fits:
        raise ConfigError(f"an object takes no options, got {', '.join(choice.options)}")
    if callable(found):
        raise PluginError(f"no adapter makes a {registry.kind} of a function{host.hints('functions')}")
    return found
