"""
Building blocks of config sections: a choice of a part, a model, and validators.

A validator's error starts with the quoted name of its field, so that messages can show the whole path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, NewType, TypeVar

import attrs
from attrs import Attribute, field, frozen, validators

from turnwise.errors import PluginError
from turnwise.models.location import is_model_id
from turnwise.types import ToolSchema

T = TypeVar("T", str, tuple[str, ...])
Options = Mapping[str, Any]
"""Options by name; their reader knows the types."""
TypeForm = Any
"""A class, or another form of a type such as a union, for which type checkers have no type."""

CodePlace = NewType("CodePlace", str)
"""
The place of the user's own code, as an option of a part: `package.module:Name`, or `./file.py:Name`.

A relative file starts from the folder of the config. The part finds the code with `Resources.find_code`.
"""
KIND: Final = "turnwise_kind"
"""Key of a field's metadata: the registry of `turnwise.plugin.host.Host` that has the names in the field."""
IN_FILE: Final = "turnwise_in_file"
"""Key of a field's metadata: False for fields that the reader of a file sets."""
SCHEMA: Final = "turnwise_schema"
"""Key of a field's metadata: JSON Schema keywords that match its validator."""

PACKAGE: Final = "package:"
"""Prefix of a path inside an installed package."""
TASK_SOURCE: Final = re.compile(r"\w[\w.-]+:.*", re.DOTALL)
"""Paths of tasks that name a registered source. Its name has two letters, so the drive of a Windows path is none."""
_MODULE: Final = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
FILE_END: Final = ".py"
GIVEN: Final = "object:"
"""Start of the name of a part that a program passes as an object."""
PLACE_PATTERN: Final = rf"^({_MODULE}|[^:]+\.py):[A-Za-z_][A-Za-z0-9_]*$"
MODULE_PATTERN: Final = rf"^({_MODULE}|[^:]+\.py)$"
# SHA-1 or SHA-256, written out: an abbreviation or a branch can come to mean another commit.
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def file_fields(kind: type) -> tuple[Attribute[object], ...]:
    """Return the fields that a file may set, their annotations resolved; `PluginError` when one cannot be."""
    try:
        attrs.resolve_types(kind)
    except NameError as error:
        raise PluginError(f"the annotations of {kind.__qualname__} cannot be resolved: {error}") from error
    return tuple(item for item in attrs.fields(kind) if item.init and item.metadata.get(IN_FILE, True))


def plain(value: object) -> Any:
    """Return a copy made of JSON values; `ValueError` for a date, an object or a number that is not finite."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: plain(item) for key, item in value.items()}
    raise ValueError(f"expected text, a number, true, false, null, a list or a mapping with text keys, got {value!r}")


def not_empty(_instance: object, attribute: Attribute[str], value: str) -> None:
    """Refuse an empty text."""
    if not value:
        raise ValueError(f"'{attribute.name}' must not be empty")


def each_matches(pattern: str, expected: str) -> Callable[[object, Attribute[T], T], None]:
    """Return a validator that refuses a text, or one of several, that is not wholly of the pattern."""

    def check(_instance: object, attribute: Attribute[T], value: T) -> None:
        for text in (value,) if isinstance(value, str) else value:
            if re.fullmatch(pattern, text) is None:
                raise ValueError(f"'{attribute.name}' must be {expected}: {text!r}")

    return check


is_path: Final = validators.optional(not_empty)
FILLED: Final = {SCHEMA: {"minLength": 1}}


@frozen
class Choice:
    """
    A part of the run; in a file, the bare name or a section with `name` and the options.

    Attributes:
        name: registered name of a plugin's part, such as `my_engine`; or the place of the user's own code,
            `package.module:Name` or `./file.py:Name`, which `modules` must list.
        options: of that part; `turnwise.config.resolve.resolve` checks them against the plugin's config class.
    """

    name: str = field(validator=not_empty, metadata=FILLED)
    options: Options = field(factory=dict, converter=plain)

    @property
    def is_own_code(self) -> bool:
        """Whether the name is the place of the user's own code."""
        return ":" in self.name

    def __attrs_post_init__(self) -> None:
        if self.is_own_code and not self.name.startswith(GIVEN) and not re.fullmatch(PLACE_PATTERN, self.name):
            expected = "a registered name, 'package.module:Name' or './file.py:Name'"
            raise ValueError(f"'name' must be {expected}: {self.name!r}")
        if "name" in self.options:
            raise ValueError("'options' must not hold 'name'")


@frozen
class ToolChoice(Choice):
    """
    A tool, and a schema of the user's own.

    Attributes:
        schema: replaces the tool's own schema, which the model sees.
    """

    schema: ToolSchema | None = None


@frozen(kw_only=True)
class ModelConfig:
    """
    Which model a run samples from.

    Attributes:
        path: directory with config, weights and tokenizer; the id of a model on the hub of Hugging Face, such as
            `Qwen/Qwen3-0.6B`, which is downloaded into its cache; a file that ends in `.gguf`, which is converted into
            a cache; or `package:NAME` for the model that an installed package ships in its folder `model`. A directory
            or file that exists comes before an id of the same spelling. Null for an engine that needs none.
        trust_remote_code: run Python code that the model's directory brings; needs `revision`.
        revision: branch, tag or commit of the model on the hub, by default its main branch; recorded in the run.
        commit: commit of the hub that `path` and `revision` meant when the run started. The run writes it to its
            config, so that a resumed run uses the same weights; leave it out.
        chat_template: file that replaces the model's own template.
        template_options: keyword arguments for the template, such as `enable_thinking`.
    """

    path: str | None = field(default=None, validator=is_path, metadata=FILLED)
    trust_remote_code: bool = False
    revision: str | None = None
    commit: str | None = None
    chat_template: str | None = field(default=None, validator=is_path, metadata=FILLED)
    template_options: Options = field(factory=dict, converter=plain)

    def __attrs_post_init__(self) -> None:
        if self.trust_remote_code and _COMMIT.fullmatch(self.revision or "") is None:
            raise ValueError(
                f"'revision' must be a whole commit hash when trust_remote_code is true: {self.revision!r}"
            )
        if self.commit is not None and _COMMIT.fullmatch(self.commit) is None:
            raise ValueError(f"'commit' must be a whole commit hash: {self.commit!r}")
        if self.commit is not None and _COMMIT.fullmatch(self.revision or "") and self.revision != self.commit:
            raise ValueError(f"'commit' must be {self.revision!r}, the commit that 'revision' names: {self.commit!r}")
        if self.commit is not None and not is_model_id(self.path or ""):
            raise ValueError(f"'commit' must be null for a 'path' that is no id of a model on the hub: {self.path!r}")
