"""
The config of a run: frozen classes with defaults. Nothing here reads files or finds plugins.

`turnwise.config.file` makes a `RunConfig` from YAML or TOML; tests and notebooks may make one directly. The field
documentation here appears in editors through the JSON schema that `turnwise config schema` prints.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import attrs
from attrs import Attribute, evolve, field, frozen, validators

from turnwise.config.parts import (
    FILLED,
    IN_FILE,
    KIND,
    MODULE_PATTERN,
    PACKAGE,
    SCHEMA,
    TASK_SOURCE,
    Choice,
    ModelConfig,
    Options,
    ToolChoice,
    each_matches,
    is_path,
    not_empty,
    plain,
)
from turnwise.config.runtime import PoolConfig, RuntimeConfig
from turnwise.config.weights import MemoryConfig, WeightsConfig
from turnwise.errors import ConfigError
from turnwise.files import expanded
from turnwise.models.finding import find_model
from turnwise.models.location import ModelSource
from turnwise.options import (
    DataColumn,
    Deadlines,
    GroupOptions,
    LogFormat,
    PromptPolicy,
    at_least_0,
    at_least_1,
)
from turnwise.protocols import ModelSpec
from turnwise.types import SamplingParams

DataFormat = Literal["auto", "csv", "jsonl", "json", "parquet"]
LogLevel = Literal["debug", "info", "warning", "error"]
ChangeChoice = Callable[[Choice, str, str], Choice]


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError as error:
        raise ConfigError("the working directory no longer exists; change to another one") from error


def _have_names(_instance: object, attribute: Attribute[Mapping[str, Choice]], value: Mapping[str, Choice]) -> None:
    if not all(name.strip() for name in value):
        raise ValueError(f"'{attribute.name}' must not hold an empty name: no task can ask for it")


@frozen(kw_only=True)
class DataSource:
    """
    One file of a mixture.

    Attributes:
        path: as `data.path`.
        weight: of the file's tasks in a training, relative to the other weights; a rollout runs every row once.
        name: `data_source` of rows that have none; null is the file's name without its ending, or the path of a task
            source without its options.
        columns: in place of `data.columns`; null keeps them.
        limit: most rows that are used; null uses all.
    """

    path: str = field(validator=not_empty, metadata=FILLED)
    weight: float = field(default=1.0, validator=validators.gt(0))
    name: str | None = None
    columns: Mapping[DataColumn, str | None] | None = None
    limit: int | None = field(default=None, validator=validators.optional(at_least_1))

    @property
    def label(self) -> str:
        """`name`, or its default."""
        if self.name is not None:
            return self.name
        path = self.path.partition("?")[0] if TASK_SOURCE.match(self.path) else self.path
        return PurePosixPath(path).stem


@frozen(kw_only=True)
class DataConfig:
    """
    The tasks of a run.

    Attributes:
        path: file with one task a row; `package:NAME/FILE` for one that an installed package ships; or `SOURCE:TEXT`,
            such as `my_puzzles:easy?size=500`, for the rows of a registered task source. A file that exists comes
            before a source of the same spelling.
        sources: several of these in place of `path`, with a weight each.
        validation_path: the same for validation. A config for an evaluation needs no other tasks.
        format: how the files are written; `auto` goes by their endings.
        columns: the files' names of understood columns, such as `prompt: question` and `ground_truth: answer`. Null
            ignores a column: `agent_name: null` runs all tasks with the config's `agent`.
        limit: most rows that are used; null uses all.
        offset: rows that are skipped at the start.
        shuffle: change the order of the rows, by the run's seed.
        prompt_policy: treatment of a prompt longer than `rollout.prompt_length`: `error` stops the run, `drop`
            leaves the task out, `truncate_left` keeps the end of the prompt and `truncate_right` its start.
    """

    path: str | None = field(default=None, validator=is_path, metadata=FILLED)
    sources: tuple[DataSource, ...] = ()
    validation_path: str | None = field(default=None, validator=is_path, metadata=FILLED)
    format: DataFormat = "auto"
    columns: Mapping[DataColumn, str | None] = field(factory=dict)
    limit: int | None = field(default=None, validator=validators.optional(at_least_1))
    offset: int = field(default=0, validator=at_least_0)
    shuffle: bool = False
    prompt_policy: PromptPolicy = "error"

    def __attrs_post_init__(self) -> None:
        if self.path is None and not self.sources and self.validation_path is None:
            raise ValueError("'path' missing; name a file here or several in data.sources")
        for name in ("path", "limit") if self.sources else ():
            if getattr(self, name) is not None:
                raise ValueError(f"'{name}' must be null beside data.sources, which have their own")
        if self.offset and self.sources:
            raise ValueError("'offset' must be 0 beside data.sources")
        labels = [source.label for source in self.sources]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"'sources' must have different names: {twice!r} is the name of two")


@frozen(kw_only=True)
class RolloutConfig(GroupOptions):
    """
    The conversion of tasks to episodes, and their limits.

    Attributes:
        prompt_length: most tokens of a prompt.
        response_length: most tokens of a response, observations included.
        fixed_widths: pad batches to these two lengths; false pads them to the longest row.
        global_step: training step that the episodes belong to.
        validation: run `data.validation_path`, with `validation_n` and `validation_sampling`.
        deadlines: time limits.
        max_steps: steps after which an agent that never ends is stopped.
        max_records: records that an episode may open; most agents open one.
        max_sampled_tokens: tokens that may be sampled in all records of an episode; null is no limit.
        max_pictures: pictures that a record may have, prompt and observations together.
        max_in_flight: episodes that one worker runs at the same time.
        check_invariants: check every trajectory against the promises of the token record.
    """

    prompt_length: int = field(default=1024, validator=at_least_1)
    response_length: int = field(default=1024, validator=at_least_1)
    fixed_widths: bool = False
    global_step: int = field(default=0, validator=at_least_0)
    validation: bool = False
    deadlines: Deadlines = field(factory=Deadlines)
    max_steps: int = field(default=1000, validator=at_least_1)
    max_records: int = field(default=64, validator=at_least_1)
    max_sampled_tokens: int | None = field(default=None, validator=validators.optional(at_least_1))
    max_pictures: int = field(default=256, validator=at_least_0)
    max_in_flight: int = field(default=256, validator=at_least_1)
    check_invariants: bool = True


@frozen(kw_only=True)
class TelemetryConfig:
    """
    Options of the log of a command, and of a script that has not configured structlog.

    Attributes:
        log_level: severity of the least severe lines that are written.
        log_format: `console` for people, `json` for one object per line, `auto` for console on a terminal. With `json`,
            a command also makes objects of the lines that libraries and Ray write to standard error.
    """

    log_level: LogLevel = "info"
    log_format: LogFormat = "auto"


@frozen(kw_only=True)
class JudgeConfig:
    """
    A second model, which rewards may ask.

    Attributes:
        engine: samples its tokens.
        model: its model; without a path it gets token ids only.
        chat: turns messages into its tokens; null is `jinja`, its chat template.
        sampling: its sampling parameters; greedy, and at most 1024 tokens, unless set.
        pool: its replicas.
    """

    engine: Choice = field(metadata={KIND: "engines"})
    model: ModelConfig = field(factory=ModelConfig)
    chat: Choice | None = field(default=None, metadata={KIND: "chats"})
    sampling: SamplingParams = field(factory=lambda: SamplingParams(temperature=0.0, max_tokens=1024))
    pool: PoolConfig = field(factory=PoolConfig)


@frozen(kw_only=True)
class RunConfig:
    """
    One run. Paths in it are relative to the folder of the file that it came from.

    Attributes:
        model: the model.
        chat: turns messages into the model's tokens; null is `jinja`, the model's chat template.
        data: the tasks.
        agent: the agent of tasks that name none.
        agents: further agents, by the name that a task's `agent_name` gives.
        engine: samples tokens.
        parser: finds tool calls in sampled tokens.
        reasoning_parser: splits the reasoning from the text of a turn, for agents that report it apart; null is the one
            of the parser's format, if it has one, such as `harmony` for `gpt_oss`.
        reward: scores episodes.
        group_reward: scores the episodes of a task together; on Ray it needs `runtime.reward_workers`.
        judge: a second model, which rewards may ask; null for none.
        interaction: answers the model in place of a user.
        tools: tools that the model can call; `schema` replaces the schema of one.
        tools_file: file with more tools, as in `tools`, or all with `class_name`, from `modules`.
        modules: modules and packages, with everything in them, and files, whose code parts may name by its place.
        postprocessors: add fields to batches, in this order.
        observers: receive the events of the run.
        router: chooses a replica for an episode on Ray; null is `least_tokens` of turnwise-routers.
        rollout: how tasks become episodes.
        runtime: where episodes run.
        telemetry: options of the log.
        weight_transport: carries new weights to replicas; null on Ray is `shm` if the run starts it, else `ray`.
        weights: conversion of weights on their way to the engines.
        memory: whether engines and a trainer share their devices.
        train: options of a trainer, such as `turnwise train`; all other commands ignore them.
        plugins: entry-point names of the plugins to load; null loads all that are installed. The hooks of a listed
            plugin that wrap parts are called.
        sections: the plugins' own sections, by entry-point name; in a file, each is a key of the top level.
        base_dir: folder that relative paths start from; not a key of the file.
    """

    data: DataConfig
    agent: Choice = field(metadata={KIND: "agents"})
    engine: Choice = field(metadata={KIND: "engines"})
    model: ModelConfig = field(factory=ModelConfig)
    chat: Choice | None = field(default=None, metadata={KIND: "chats"})
    agents: Mapping[str, Choice] = field(factory=dict, validator=_have_names, metadata={KIND: "agents"})
    parser: Choice | None = field(default=None, metadata={KIND: "tool_parsers"})
    reasoning_parser: Choice | None = field(default=None, metadata={KIND: "reasoning_parsers"})
    reward: Choice | None = field(default=None, metadata={KIND: "rewards"})
    group_reward: Choice | None = field(default=None, metadata={KIND: "group_rewards"})
    judge: JudgeConfig | None = field(default=None, metadata={KIND: "engines"})
    interaction: Choice | None = field(default=None, metadata={KIND: "interactions"})
    tools: tuple[ToolChoice, ...] = field(default=(), metadata={KIND: "tools"})
    tools_file: str | None = field(default=None, validator=is_path, metadata=FILLED)
    modules: tuple[str, ...] = field(
        default=(),
        validator=each_matches(MODULE_PATTERN, "names of modules or files that end in .py"),
        metadata={SCHEMA: {"items": {"type": "string", "pattern": MODULE_PATTERN}}},
    )
    postprocessors: tuple[Choice, ...] = field(default=(), metadata={KIND: "postprocessors"})
    observers: tuple[Choice, ...] = field(default=(), metadata={KIND: "observers"})
    router: Choice | None = field(default=None, metadata={KIND: "routers"})
    rollout: RolloutConfig = field(factory=RolloutConfig)
    runtime: RuntimeConfig = field(factory=RuntimeConfig)
    telemetry: TelemetryConfig = field(factory=TelemetryConfig)
    weight_transport: Choice | None = field(default=None, metadata={KIND: "weight_transports"})
    weights: WeightsConfig = field(factory=WeightsConfig)
    memory: MemoryConfig = field(factory=MemoryConfig)
    train: Options = field(factory=dict, converter=plain)
    plugins: tuple[str, ...] | None = None
    sections: Mapping[str, Any] = field(factory=dict, converter=plain, metadata={IN_FILE: False})
    base_dir: Path = field(factory=Path, converter=_absolute, metadata={IN_FILE: False})

    def __attrs_post_init__(self) -> None:
        if self.judge is not None and self.runtime.name == "local" and (self.judge.pool.num_replicas or 1) > 1:
            raise ValueError("'judge.pool.num_replicas' must be 1 with the runtime local; set runtime.name to ray")
        if self.group_reward is not None and self.runtime.name == "ray" and not self.runtime.reward_workers:
            raise ValueError("'runtime.reward_workers' must be at least 1 on Ray with a group_reward")

    def locate(self, path: str) -> Path:
        """Return the file or folder that a path means; `ConfigError` when a `package:` path does not exist."""
        if path.startswith(PACKAGE):
            return _in_package(path)
        return self.base_dir / expanded(path)

    def is_task_source(self, path: str) -> bool:
        """Return whether a path of tasks names a registered source: it has the form `SOURCE:TEXT` and is no file."""
        if path.startswith(PACKAGE) or not TASK_SOURCE.match(path):
            return False
        return not os.path.exists(self.locate(path))  # `Path.exists` raises for a text too long for a file's name

    def model_source(self, model: ModelConfig | None = None) -> ModelSource | None:
        """Return where the model, or another of this config, is to be found; None without a path."""
        model = model or self.model
        path = model.path
        if path is None:
            return None
        if path.startswith(PACKAGE):
            path = str(_in_package(path if "/" in path else f"{path}/model"))
        return ModelSource(
            path=path,
            base_dir=self.base_dir,
            revision=model.revision,
            commit=model.commit,
            code=model.trust_remote_code,
            key="model.path" if model is self.model else "judge.model.path",
        )

    def is_on_hub(self, model: ModelConfig) -> bool:
        """Return whether a model of this config is one of the hub, and no directory or file."""
        if model.path is None or model.path.startswith(PACKAGE):
            return False
        source = self.model_source(model)
        return source is not None and source.is_on_hub

    def model_spec(self, model: ModelConfig | None = None, *, weights: bool = False) -> ModelSpec:
        """
        Return the model, or another of this config, with its paths located.

        What this machine lacks of a model on the hub is downloaded, and a GGUF file is converted.

        Args:
            model: the run's own if None.
            weights: the weights must be there too.

        Raises:
            ConfigError: see `locate` and `turnwise.models.finding.find_model`.
        """
        model = model or self.model
        source = self.model_source(model)
        found = None if source is None else find_model(source, weights=weights)
        return ModelSpec(
            path=None if found is None else found.folder,
            name="" if found is None else found.name,
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
            chat_template=None if model.chat_template is None else self.locate(model.chat_template),
            template_options=model.template_options,
            commit=None if found is None else found.commit,
        )


def map_choices(value: object, change: ChangeChoice, kind: str = "", path: str = "") -> Any:
    """Return a config, or a value in one, with the results of `change(choice, registry, path)` for its choices."""
    if isinstance(value, Choice):
        return change(value, kind, path)
    if isinstance(value, RunConfig | JudgeConfig):
        kinds, prefix = kinds_of(type(value)), f"{path}." if path else ""
        changed = {name: map_choices(getattr(value, name), change, kinds[name], prefix + name) for name in kinds}
        return evolve(value, **changed)
    if isinstance(value, Mapping):
        return {key: map_choices(item, change, kind, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map_choices(item, change, kind, f"{path}.{index}") for index, item in enumerate(value))
    return value


def kinds_of(section: type) -> dict[str, str]:
    """Return the fields of a config class that choose parts, with the registry of each."""
    return {item.name: item.metadata[KIND] for item in attrs.fields(section) if KIND in item.metadata}


def _in_package(path: str) -> Path:
    name, _, rest = path.removeprefix(PACKAGE).partition("/")
    inner = PurePosixPath(rest)
    if not name.isidentifier() or inner.is_absolute() or ".." in inner.parts:
        raise ConfigError(f"{path}: expected package:NAME/PATH with a top-level package and a path inside it")
    # find_spec does not import a top-level package, so a model can be found although its package cannot be imported.
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ConfigError(f"{path}: no package {name!r} is installed")
    for folder in spec.submodule_search_locations or ():
        if (found := Path(folder, inner)).exists():
            return found
    raise ConfigError(f"{path}: the package {name!r} does not ship {rest!r}")
