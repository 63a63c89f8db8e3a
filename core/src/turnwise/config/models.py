"""Models of a run on the hub: they are downloaded before anything starts, and the run's config keeps their commits."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from turnwise.config.parts import Choice, ModelConfig
from turnwise.config.run import RunConfig
from turnwise.models.finding import find_model
from turnwise.models.location import ModelSource
from turnwise.plugin.host import Host
from turnwise.protocols import ModelSpec


def pin_models(config: RunConfig, host: Host, *, weights: bool | None = None) -> RunConfig:
    """
    Return a config whose models on the hub have their commits. What this machine lacks of them is downloaded.

    Args:
        config: resolved config.
        host: the loaded plugins.
        weights: download the weights too; None does so if the engine of a model reads them.

    Raises:
        ConfigError: there is no such model, or it cannot be downloaded.
    """

    def pin(model: ModelConfig, engine: Choice) -> ModelConfig:
        source = _source(config, model)
        if source is None:
            return model
        needed = reads_weights(host, engine) if weights is None else weights
        return evolve(model, commit=find_model(source, weights=needed).commit)

    judge = config.judge
    return evolve(
        config,
        model=pin(config.model, config.engine),
        judge=None if judge is None else evolve(judge, model=pin(judge.model, judge.engine)),
    )


def keep_commits(config: RunConfig, earlier: RunConfig) -> RunConfig:
    """
    Return a config with the commits of the run that it continues.

    A branch may have moved since. A model with another path or revision keeps nothing.
    """

    def keep(model: ModelConfig, before: ModelConfig) -> ModelConfig:
        is_same = (model.path, model.revision, model.commit) == (before.path, before.revision, None)
        return evolve(model, commit=before.commit) if is_same and config.is_on_hub(model) else model

    judge, before = config.judge, earlier.judge
    if judge is not None and before is not None:
        judge = evolve(judge, model=keep(judge.model, before.model))
    return evolve(config, model=keep(config.model, earlier.model), judge=judge)


def find_here(model: ModelSpec) -> ModelSpec:
    """Return a located model of another machine as one of this machine, which downloads what it lacks of the hub."""
    if model.commit is None:
        return model
    code = model.trust_remote_code
    source = ModelSource(path=model.name, base_dir=Path.cwd(), commit=model.commit, code=code)
    return evolve(model, path=find_model(source).folder)


def reads_weights(host: Host, engine: Choice) -> bool:
    """Return whether an engine reads the weights of its model; one of the user's own code does."""
    return engine.is_own_code or host.entry("engines", engine.name).reads_weights


def _source(config: RunConfig, model: ModelConfig) -> ModelSource | None:
    return config.model_source(model) if config.is_on_hub(model) else None
