"""Reads the part of a Dockerfile that needs no image: the working folder, variables and copied files."""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from attrs import define, field

from turnwise.errors import DataError

_CONTINUED: Final = re.compile(r"\\\s*\n")
_WITHOUT_EFFECT: Final = frozenset(
    {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER", "VOLUME"}
)
_VARIABLE: Final = re.compile(r"\\\$|\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_EXPANDED: Final = frozenset({"ADD", "COPY", "ENV", "WORKDIR"})
DOCKERFILE: Final = "Dockerfile"
IGNORED: Final = ".dockerignore"


@define
class Recipe:
    """
    The effect of a Dockerfile.

    Attributes:
        folder: working folder at its end; empty if it names none.
        environment: variables that it sets.
        files: contents by absolute path, or relative to the working folder if it names none.
        run: its first step that needs an image; empty without one.
        arguments: values of `ARG` in the stage.
        defaults: those before the first `FROM`, which a stage has when it names them.
        num_stages: number of `FROM`.
    """

    folder: str = ""
    environment: dict[str, str] = field(factory=dict)
    files: dict[str, bytes] = field(factory=dict)
    run: str = ""
    arguments: dict[str, str] = field(factory=dict)
    defaults: dict[str, str] = field(factory=dict)
    num_stages: int = 0


def read_dockerfile(text: str, context: Mapping[str, bytes]) -> Recipe:
    """
    Read a Dockerfile.

    Args:
        text: of the file.
        context: contents by path of the folder of the file.

    Raises:
        DataError: a step cannot be read; one line that starts with the step.
    """
    recipe = Recipe()
    for name, rest in _steps(text):
        _apply(recipe, name, rest, context)
    return recipe


def read_working_folder(text: str) -> str:
    """Return the working folder at the end of a Dockerfile's last stage; empty if it is not in the text."""
    recipe = Recipe()
    for name, rest in _steps(text):
        if name == "FROM":
            recipe = Recipe(
                defaults=recipe.defaults | (recipe.arguments if recipe.num_stages == 0 else {}), num_stages=1
            )
        elif name in ("ARG", "ENV", "WORKDIR"):
            with contextlib.suppress(DataError):
                _apply(recipe, name, rest, {})
    return recipe.folder


def _steps(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in _CONTINUED.sub(" ", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name:
            yield name.upper(), rest.strip()


def _apply(recipe: Recipe, name: str, rest: str, context: Mapping[str, bytes]) -> None:
    if name in _EXPANDED:
        try:
            rest = _expand(rest, recipe)
        except KeyError:  # a variable of the image
            recipe.run = recipe.run or f"{name} {rest}"
            return
    if name == "FROM":
        recipe.num_stages += 1
        if recipe.num_stages > 1:
            recipe.run = recipe.run or f"{name} {rest}"
        recipe.defaults, recipe.arguments = recipe.defaults | recipe.arguments, {}
    elif name == "ARG":
        recipe.arguments |= _read_variables(rest) if "=" in rest else {rest: recipe.defaults.get(rest, "")}
    elif name == "WORKDIR":
        recipe.folder = posixpath.normpath(posixpath.join(recipe.folder or "/", rest.strip("\"'")))
    elif name == "ENV":
        recipe.environment |= _read_variables(rest)
    elif name in ("COPY", "ADD"):
        _copy(recipe, f"{name} {rest}", context)
    elif name not in _WITHOUT_EFFECT:
        recipe.run = recipe.run or f"{name} {rest}"


def _expand(text: str, recipe: Recipe) -> str:
    """Return a text with the values of its variables; `KeyError` for one that only the image knows."""
    known = recipe.arguments | recipe.environment

    def value(found: re.Match[str]) -> str:
        if found[0].startswith("\\"):
            return "$"
        name = found[1] or found[2]
        return known[name] if found[3] is None else known.get(name) or found[3]

    return _VARIABLE.sub(value, text)


def _read_words(rest: str) -> list[str]:
    try:
        found = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        raise DataError(f"{rest!r:.80}: cannot be read: {error}") from error
    return [str(each) for each in found]


def _read_variables(rest: str) -> dict[str, str]:
    words = _read_words(rest)
    if words and "=" not in words[0]:  # the old form: ENV NAME VALUE
        return {words[0]: " ".join(words[1:])}
    return {name: value for name, _, value in (each.partition("=") for each in words)}


def _copy(recipe: Recipe, step: str, context: Mapping[str, bytes]) -> None:
    _, *rest = step.split(None, 1)
    options, text = [], "".join(rest)
    while text.startswith("--"):
        option, _, text = text.partition(" ")
        options.append(option)
        text = text.lstrip()
    *sources, target = _read_words(text) or [""]
    needs_image = any(not each.startswith(("--chown", "--chmod")) for each in options) or not sources or "<<" in text
    if needs_image or any("*" in each or "?" in each or "://" in each for each in sources):
        recipe.run = recipe.run or step
        return
    is_folder = target.endswith("/") or len(sources) > 1 or target in (".", "./")
    base = posixpath.normpath(posixpath.join(recipe.folder, target))
    for source in sources:
        path = posixpath.normpath(source.lstrip("/") or ".")
        if path in context:
            recipe.files[posixpath.join(base, posixpath.basename(path)) if is_folder else base] = context[path]
            continue
        if IGNORED in context:  # a builder leaves some files out, by rules that are not read here
            recipe.run = recipe.run or step
            return
        inside = "" if path == "." else f"{path}/"
        found = {name: data for name, data in context.items() if name.startswith(inside)}
        if not found:
            raise DataError(f"{step!r:.80}: there is no {source!r} beside the Dockerfile")
        recipe.files |= {posixpath.join(base, name.removeprefix(inside)): data for name, data in found.items()}
