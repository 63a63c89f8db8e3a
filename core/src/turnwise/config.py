"""
What a run is: frozen classes with defaults, and nothing that reads files or finds plugins.

`turnwise.config_file` makes a `RunConfig` from YAML or TOML; tests and notebooks may make one directly. The field
documentation here is what `turnwise.config_schema` shows in editors. A validator's text begins with the quoted name of
the field that it is about, so that errors can name the whole path.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from attrs import Attribute, field, frozen, validators

from turnwise.config_runtime import RuntimeConfig
from turnwise.errors import ConfigError
from turnwise.protocols import ModelSpec
from turnwise.types import SamplingParams

PromptPolicy = Literal["error", "drop", "truncate_left", "truncate_right"]
DataFormat = Literal["auto", "jsonl", "json", "parquet"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]

KIND: Final = "turnwise_kind"
"""Key of a field's metadata: which registry of `turnwise.host.Host` the names in the field come from."""
IN_FILE: Final = "turnwise_in_file"
"""Key of a field's metadata: False for what the reader of a file sets, not its writer."""
SCHEMA: Final = "turnwise_schema"
"""Key of a field's metadata: JSON Schema keywords for what its validator checks."""

PACKAGE: Final = "package:"
"""Begins a path inside an installed package."""
_MODULE: Final = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
TARGET_PATTERN: Final = rf"^{_MODULE}:[A-Za-z_][A-Za-z0-9_]*$"
MODULE_PATTERN: Final = rf"^{_MODULE}$"
# SHA-1 or SHA-256, written out: an abbreviation or a branch can come to mean another commit.
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def plain(value: Any) -> Any:
    """
    Return a copy made of what JSON and YAML can hold: null, booleans, numbers, text, lists, mappings with text keys.

    Raises:
        ValueError: there is anything else in it, such as a date, an object or a number that is not finite.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: plain(item) for key, item in value.items()}
    raise ValueError(f"expected text, a number, true, false, null, a list or a mapping with text keys, got {value!r}")


def _not_empty(_instance: object, attribute: Attribute[Any], value: str) -> None:
    if not value:
        raise ValueError(f"'{attribute.name}' must not be empty")


def _each_matches(pattern: str, what: str) -> Callable[[object, Attribute[Any], Any], None]:
    def check(_instance: object, attribute: Attribute[Any], value: str | tuple[str, ...]) -> None:
        for text in (value,) if isinstance(value, str) else value:
            if re.fullmatch(pattern, text) is None:
                raise ValueError(f"'{attribute.name}' must be {what}: {text!r}")

    return check


def _absolute(path: Path) -> Path:
    return path.absolute()


_at_least_0: Final = validators.ge(0)
_at_least_1: Final = validators.ge(1)
_more_than_0: Final = validators.gt(0.0)
_is_path: Final = validators.optional(_not_empty)
_FILLED: Final = {SCHEMA: {"minLength": 1}}
_is_target: Final = _each_matches(TARGET_PATTERN, "'package.module:name'")


@frozen
class Choice:
    """
    A plugin's part by its registered name; in a file, the bare name or a section with `name` and the options.

    Attributes:
        name: what the plugin registered, such as `vllm`.
        options: of that part; checked against the plugin's config class by `turnwise.host.resolve`.
    """

    name: str = field(validator=_not_empty, metadata=_FILLED)
    options: Mapping[str, Any] = field(factory=dict, converter=plain)

    def __attrs_post_init__(self) -> None:
        """Refuse an option that a file could not hold."""
        if "name" in self.options:
            raise ValueError("'options' must not hold 'name'")


@frozen
class ToolFunction:
    """
    A Python function as a tool; its type hints and docstring become the schema.

    Attributes:
        function: where it is, as `package.module:name`; the module must be in `tool_modules`.
    """

    function: str = field(validator=_is_target, metadata={SCHEMA: {"pattern": TARGET_PATTERN}})


@frozen
class ToolClass:
    """
    A class of the user's own as a tool.

    Attributes:
        target: where it is, as `package.module:Name`; the key in a file is `class`. The module must be in
            `tool_modules`.
        options: keyword arguments for it; every other key of the section.
    """

    target: str = field(validator=_is_target, metadata={SCHEMA: {"pattern": TARGET_PATTERN}})
    options: Mapping[str, Any] = field(factory=dict, converter=plain)

    def __attrs_post_init__(self) -> None:
        """Refuse an option that a file could not hold."""
        if taken := {"name", "class"}.intersection(self.options):
            raise ValueError(f"'options' must not hold {min(taken)!r}")


ToolEntry = Choice | ToolFunction | ToolClass
"""One item of `tools`."""


@frozen(kw_only=True)
class ModelConfig:
    """
    Which model a run samples from.

    Attributes:
        path: directory with config, weights and tokenizer, or `package:NAME` for the model that an installed package
            ships in its folder `model`; null for an engine that needs none.
        trust_remote_code: run Python code that the model's directory brings; needs `revision`.
        revision: the model's commit, recorded in the run.
        chat_template: file that replaces the model's own template.
        template_options: keyword arguments for the template, such as `enable_thinking`.
    """

    path: str | None = field(default=None, validator=_is_path, metadata=_FILLED)
    trust_remote_code: bool = False
    revision: str | None = None
    chat_template: str | None = field(default=None, validator=_is_path, metadata=_FILLED)
    template_options: Mapping[str, Any] = field(factory=dict, converter=plain)

    def __attrs_post_init__(self) -> None:
        """Refuse code that is not pinned."""
        if self.trust_remote_code and _COMMIT.fullmatch(self.revision or "") is None:
            raise ValueError(
                f"'revision' must be a whole commit hash when trust_remote_code is true: {self.revision!r}"
            )


@frozen(kw_only=True)
class DataConfig:
    """
    Which tasks a run works on.

    Attributes:
        path: file with one task a row, or `package:NAME/FILE` for one that an installed package ships.
        validation_path: the same for validation.
        format: how the files are written; `auto` goes by their endings.
        limit: most rows that are used; null uses all.
        offset: rows that are skipped at the start.
        shuffle: change the order of the rows, by the run's seed.
        prompt_policy: what becomes of a prompt longer than `rollout.prompt_length`: `error` stops the run, `drop`
            leaves the task out, `truncate_left` keeps the end of the prompt and `truncate_right` its start.
    """

    path: str = field(validator=_not_empty, metadata=_FILLED)
    validation_path: str | None = field(default=None, validator=_is_path, metadata=_FILLED)
    format: DataFormat = "auto"
    limit: int | None = field(default=None, validator=validators.optional(_at_least_1))
    offset: int = field(default=0, validator=_at_least_0)
    shuffle: bool = False
    prompt_policy: PromptPolicy = "error"


@frozen(kw_only=True)
class DeadlinesConfig:
    """
    How long things may take, in seconds.

    Attributes:
        tool_call_s: one tool call; the model is told when it is over.
        turn_s: from one generate call to the next.
        episode_s: all steps of an episode.
        reward_s: scoring an episode.
        abort_grace_s: what an engine gets to hand back what it had sampled.
    """

    tool_call_s: float = field(default=60.0, validator=_more_than_0)
    turn_s: float = field(default=600.0, validator=_more_than_0)
    episode_s: float = field(default=3600.0, validator=_more_than_0)
    reward_s: float = field(default=60.0, validator=_more_than_0)
    abort_grace_s: float = field(default=5.0, validator=_more_than_0)


@frozen(kw_only=True)
class RolloutConfig:
    """
    How tasks become episodes.

    Attributes:
        n: episodes per task: the size of a GRPO group.
        validation_n: episodes per task in validation.
        prompt_length: most tokens of a prompt.
        response_length: most tokens of a response, observations included.
        seed: of the run; every request derives its own from it.
        global_step: training step that the episodes belong to.
        validation: run `data.validation_path`, with `validation_n` and `validation_sampling`.
        sampling: how tokens are drawn.
        validation_sampling: how they are drawn in validation; greedy unless set.
        deadlines: how long things may take.
        max_steps: steps after which an agent that never ends is stopped.
        max_in_flight: episodes that one worker runs at the same time.
        check_invariants: check every trajectory against the promises of the token record.
    """

    n: int = field(default=1, validator=_at_least_1)
    validation_n: int = field(default=1, validator=_at_least_1)
    prompt_length: int = field(default=1024, validator=_at_least_1)
    response_length: int = field(default=1024, validator=_at_least_1)
    seed: int = field(default=0, validator=_at_least_0)
    global_step: int = field(default=0, validator=_at_least_0)
    validation: bool = False
    sampling: SamplingParams = field(factory=SamplingParams)
    validation_sampling: SamplingParams = field(factory=lambda: SamplingParams(temperature=0.0))
    deadlines: DeadlinesConfig = field(factory=DeadlinesConfig)
    max_steps: int = field(default=1000, validator=_at_least_1)
    max_in_flight: int = field(default=256, validator=_at_least_1)
    check_invariants: bool = True


@frozen(kw_only=True)
class TelemetryConfig:
    """
    What is logged.

    Attributes:
        log_level: the least severe lines that are written.
        log_format: `console` for people, `json` for one object per line, `auto` for console on a terminal.
    """

    log_level: LogLevel = "info"
    log_format: LogFormat = "auto"


@frozen(kw_only=True)
class RunConfig:
    """
    One run. Paths in it are relative to the folder of the file that it came from.

    Attributes:
        model: which model.
        data: which tasks.
        agent: the agent of tasks that name none.
        agents: further agents, by the name that a task's `agent_name` gives.
        engine: what samples tokens.
        parser: what finds tool calls in them.
        reward: what scores episodes.
        interaction: what answers the model in place of a user.
        tools: what the model can call: a registered name, a section with `name` and options, `function` with the place
            of a Python function, or `class` with the place of a class and its options.
        tools_file: file with more tools.
        tool_modules: modules, with everything in them, that `function` and `class` may name.
        postprocessors: what adds fields to batches, in this order.
        observers: who hears what happens.
        router: what chooses a replica for an episode; null is `least_tokens`.
        rollout: how tasks become episodes.
        runtime: where episodes run.
        telemetry: what is logged.
        plugins: entry-point names of the plugins to load; null loads all that are installed.
        base_dir: folder that relative paths start from; not a key of the file.
    """

    data: DataConfig
    agent: Choice = field(metadata={KIND: "agents"})
    engine: Choice = field(metadata={KIND: "engines"})
    model: ModelConfig = field(factory=ModelConfig)
    agents: Mapping[str, Choice] = field(factory=dict, metadata={KIND: "agents"})
    parser: Choice | None = field(default=None, metadata={KIND: "tool_parsers"})
    reward: Choice | None = field(default=None, metadata={KIND: "rewards"})
    interaction: Choice | None = field(default=None, metadata={KIND: "interactions"})
    tools: tuple[ToolEntry, ...] = field(default=(), metadata={KIND: "tools"})
    tools_file: str | None = field(default=None, validator=_is_path, metadata=_FILLED)
    tool_modules: tuple[str, ...] = field(
        default=(),
        validator=_each_matches(MODULE_PATTERN, "module names"),
        metadata={SCHEMA: {"items": {"type": "string", "pattern": MODULE_PATTERN}}},
    )
    postprocessors: tuple[Choice, ...] = field(default=(), metadata={KIND: "postprocessors"})
    observers: tuple[Choice, ...] = field(default=(), metadata={KIND: "observers"})
    router: Choice | None = field(default=None, metadata={KIND: "routers"})
    rollout: RolloutConfig = field(factory=RolloutConfig)
    runtime: RuntimeConfig = field(factory=RuntimeConfig)
    telemetry: TelemetryConfig = field(factory=TelemetryConfig)
    plugins: tuple[str, ...] | None = None
    base_dir: Path = field(factory=Path, converter=_absolute, metadata={IN_FILE: False})

    def __attrs_post_init__(self) -> None:
        """Refuse Python code of modules that were not allowed."""
        for index, tool in enumerate(self.tools):
            if isinstance(tool, Choice):
                continue
            target = tool.function if isinstance(tool, ToolFunction) else tool.target
            module = target.partition(":")[0]
            if not self.allows_module(module):
                raise ValueError(f"'tools.{index}' names the module {module!r}; list it in tool_modules to allow it")

    def allows_module(self, module: str) -> bool:
        """Return whether `tool_modules` holds the module or a package that it is in."""
        return any(module == allowed or module.startswith(f"{allowed}.") for allowed in self.tool_modules)

    def locate(self, path: str) -> Path:
        """
        Return the file or folder that a path of this config means; only for `package:` must it exist.

        Raises:
            ConfigError: the package of a `package:` path is not installed or does not ship it.
        """
        if path.startswith(PACKAGE):
            return _in_package(path)
        return self.base_dir / Path(path).expanduser()

    def model_spec(self) -> ModelSpec:
        """Return the model with its paths located; `ConfigError` as in `locate`."""
        model = self.model
        path = model.path
        if path is not None and path.startswith(PACKAGE) and "/" not in path:
            path = f"{path}/model"
        return ModelSpec(
            path=None if path is None else self.locate(path),
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
            chat_template=None if model.chat_template is None else self.locate(model.chat_template),
            template_options=model.template_options,
        )


def _in_package(path: str) -> Path:
    name, _, rest = path.removeprefix(PACKAGE).partition("/")
    inner = PurePosixPath(rest)
    if not name.isidentifier() or inner.is_absolute() or ".." in inner.parts:
        raise ConfigError(f"{path}: expected package:NAME/PATH with a top-level package and a path inside it")
    # find_spec does not import a top-level package, so a model can be found without what its package needs to run.
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ConfigError(f"{path}: no package {name!r} is installed")
    for folder in spec.submodule_search_locations or ():
        if (found := Path(folder, inner)).exists():
            return found
    raise ConfigError(f"{path}: the package {name!r} does not ship {rest!r}")
