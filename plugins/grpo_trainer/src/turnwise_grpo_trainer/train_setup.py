"""Reads a config and checks it for training: the data that a training is built from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import asdict, evolve, frozen

from turnwise import Capabilities, Host, RunConfig, Task, configure_logging, load_resolved, structure
from turnwise.config.models import keep_commits, pin_models
from turnwise.config.own_code import OwnCode
from turnwise.errors import ConfigError, PluginError
from turnwise.protocols import ModelSpec
from turnwise.weights.sleep import drops_weights
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.objective.hooks import GROUP_ADVANTAGES, ColumnLoss, build_objectives
from turnwise_grpo_trainer.objective.replays import build_replays
from turnwise_grpo_trainer.objective.scorers import Scorer, ScoringRun, build_scorers, check_columns, plain_choices
from turnwise_rollout_buffer.task_stream import Share
from turnwise_task_files import load_sources, load_tasks


@frozen
class TrainSetup:
    """
    The inputs of a training.

    Attributes:
        run: the resolved run config.
        host: the loaded plugins.
        train: the `train` section.
        model: the model to train; of one on the hub, the path is there after `with_model`.
        tasks: training tasks.
        validation_tasks: held-out tasks; empty if the config names none.
        shares: the files of a mixture, in the order of their tasks; empty for a single file.
    """

    run: RunConfig
    host: Host
    train: TrainConfig
    model: ModelSpec
    tasks: Sequence[Task]
    validation_tasks: Sequence[Task]
    shares: Sequence[Share] = ()

    @property
    def group_size(self) -> int:
        """Episodes in a group."""
        return self.run.rollout.n

    @property
    def code(self) -> OwnCode:
        """The user's own code that the run may use."""
        return OwnCode(modules=self.run.modules, base_dir=self.run.base_dir)

    @property
    def scoring(self) -> ScoringRun:
        """What scorers know of the training; the model is on this machine."""
        temperature = self.run.rollout.sampling.temperature
        return ScoringRun(model=self.model, policy=self.train.policy, temperature=temperature, tasks=self.tasks)

    def check_replays(self, engine: Capabilities | None = None) -> None:
        """Raise `ConfigError` for a replay that does not fit the model, or the engine, once it is known."""
        for replay in build_replays(self.train.replays, self.host, self.code):
            replay.check(self.model)
            if engine is not None:
                replay.check_engine(engine, self.run.engine.name)

    def checked_scorers(self) -> tuple[Scorer, ...]:
        """Build the scorers; `ConfigError` for one that does not fit the training."""
        scorers = build_scorers(self.train.scorers, self.host, self.code)
        for scorer in scorers:
            scorer.check(self.scoring)
        loss = build_objectives(self.train, self.host.recipe(), self.code).loss
        needed = loss.columns if isinstance(loss, ColumnLoss) else ()
        check_columns(scorers, needed, self.host.registry("columns").names())
        return scorers

    @property
    def shares_devices(self) -> bool:
        """Whether engine and trainer hold the memory of the same devices in turns."""
        return self.run.memory.mode == "hybrid"

    @property
    def drops_weights(self) -> bool:
        """Whether the engine loses its weights during updates, so that it needs all of them afterwards."""
        return self.shares_devices and drops_weights(self.run.memory.level)

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values, for experiment trackers."""
        run = self.run
        parts = {kind: getattr(run, kind).name for kind in ("engine", "agent", "reward", "runtime")}
        return {
            "model": self.model.name if self.model.commit else str(self.model.path),
            **parts,
            "rollout": asdict(run.rollout),
            "memory": asdict(run.memory),
            "train": asdict(self.train),
        }


def read_setup(
    path: str, overrides: Iterable[str] = (), *, needs_train: bool = True, with_logging: bool = False
) -> TrainSetup:
    """
    Read a config and check it.

    Args:
        path: YAML or TOML file.
        overrides: values such as `rollout.n=4`.
        needs_train: require the `train` section and load the training tasks.
        with_logging: configure the log of this process by the config before the tasks are read, which may log.

    Raises:
        ConfigError, DataError, PluginError: one line for each problem.
    """
    run, host = load_resolved(path, overrides)
    if with_logging:
        configure_logging(run.telemetry.log_level, run.telemetry.log_format, whole_stream=True)
    if needs_train and not run.train:
        raise ConfigError(f"{path}: train: missing; add this section, see turnwise train --help")
    train = _structure_train(run.train, path)
    sources = load_sources(run) if needs_train else []
    tasks = [task for source in sources for task in source]
    weights = [source.weight for source in run.data.sources]
    shares = [Share(len(source), weight) for source, weight in zip(sources, weights, strict=False)]
    setup = TrainSetup(run, host, train, ModelSpec(), tasks, _load_validation_tasks(run), shares)
    if needs_train:
        _check(setup, path)
        setup = _with_absolute_scorers(setup)
    return setup if run.is_on_hub(run.model) else evolve(setup, model=run.model_spec())


def with_model(setup: TrainSetup, earlier: RunConfig | None = None, *, weights: bool = True) -> TrainSetup:
    """
    Return a setup whose model is on this machine, downloaded or converted if necessary.

    Args:
        setup: the inputs of the training.
        earlier: config of the training to continue, whose commits stay.
        weights: download the weights of a model on the hub too.

    Raises:
        ConfigError: the model does not exist or cannot be downloaded.
    """
    run = setup.run if earlier is None else keep_commits(setup.run, earlier)
    run = pin_models(run, setup.host, weights=weights)
    return evolve(setup, run=run, model=run.model_spec(weights=weights))


def _with_absolute_scorers(setup: TrainSetup) -> TrainSetup:
    """Return a setup whose run can be written to another folder: the core does not know the paths of a scorer."""
    if not setup.train.scorers:
        return setup
    scorers = plain_choices(setup.train.scorers, setup.host, setup.run.base_dir)
    return evolve(setup, run=evolve(setup.run, train={**setup.run.train, "scorers": scorers}))


def _structure_train(section: Mapping[str, object], path: str) -> TrainConfig:
    try:
        train: TrainConfig = structure(dict(section), TrainConfig, path="train")
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error
    return train


def _load_validation_tasks(run: RunConfig) -> list[Task]:
    if run.data.validation_path is None:
        return []
    return load_tasks(evolve(run, rollout=evolve(run.rollout, validation=True)))


def _check(setup: TrainSetup, path: str) -> None:
    """Raise `ConfigError` for the first combination of settings that cannot be trained with."""
    run, train = setup.run, setup.train
    sampling = run.rollout.sampling
    grouped = train.algorithm.adv_estimator.name in GROUP_ADVANTAGES
    problems = {
        "rollout.n: must be at least 2: a group of one has no baseline": grouped and run.rollout.n < 2,
        "train.buffer.dynamic_sampling: needs rollout.n of at least 2: the rewards of a group of one never differ": (
            train.buffer.dynamic_sampling and run.rollout.n < 2
        ),
        "rollout.sampling.temperature: must be above 0 to train": sampling.temperature == 0,
        "rollout.sampling: top_p must be 1 and top_k -1 to train: the trainer computes log-probabilities of the full"
        " distribution": sampling.top_p != 1 or sampling.top_k != -1,
        "rollout.sampling.extra: must be empty to train: the trainer computes log-probabilities of the model's own"
        " distribution, and options of the engine change it": bool(sampling.extra),
        f"train.tasks_per_step: {train.tasks_per_step} is more than the {len(setup.tasks)} tasks": (
            train.tasks_per_step > len(setup.tasks)
        ),
        "train.algorithm.use_kl_in_reward: needs train.algorithm.kl_loss_coef above 0": (
            train.algorithm.use_kl_in_reward and train.algorithm.kl_loss_coef == 0
        ),
        "train.algorithm.target_kl: has no effect with one optimizer step on a batch; set"
        " train.algorithm.ppo_mini_batch_size or ppo_epochs, or remove it": (
            train.algorithm.target_kl is not None
            and train.algorithm.ppo_mini_batch_size is None
            and train.algorithm.ppo_epochs == 1
        ),
        "train.algorithm.mis_bounds: needs old_log_probs: recompute, which compares engine and trainer": (
            train.algorithm.mis_bounds is not None and train.algorithm.old_log_probs == "rollout"
        ),
        "train.validation.patience: needs train.validation.every above 0": (
            train.validation.patience is not None and train.validation.every == 0
        ),
        "train.validation.patience: needs held-out tasks; set data.validation_path": (
            train.validation.patience is not None and not setup.validation_tasks
        ),
        "train.checkpoint.export: best needs held-out tasks; set data.validation_path": (
            train.checkpoint.export == "best" and not setup.validation_tasks
        ),
        "train.checkpoint.export: best needs train.checkpoint.keep_best": (
            train.checkpoint.export == "best" and not train.checkpoint.keep_best
        ),
        "reward: missing; training needs one": run.reward is None,
        "train.mode: async needs memory.mode=standalone: on shared devices the engine sleeps during updates": (
            train.mode == "async" and setup.shares_devices
        ),
        f"train.buffer.max_groups: must be at least train.tasks_per_step, which is {train.tasks_per_step}": (
            (train.buffer.max_groups or train.tasks_per_step) < train.tasks_per_step
        ),
    }
    for text, is_problem in (problems | _more_problems(setup)).items():
        if is_problem:
            raise ConfigError(f"{path}: {text}")
    try:
        build_objectives(train, setup.host.recipe(), setup.code)
        build_scorers(train.scorers, setup.host, setup.code)
    except (ConfigError, PluginError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _more_problems(setup: TrainSetup) -> dict[str, bool]:
    """Return whether each of the problems with optional sections is there."""
    lora, algorithm, limit = setup.train.lora, setup.train.algorithm, setup.run.rollout.response_length
    overlong, sharding = algorithm.overlong, setup.train.sharding
    return {
        "train.sharding.fully_shard: must not be false with several processes: nothing would average their gradients": (
            sharding.num_processes > 1 and sharding.fully_shard is False
        ),
        "train.buffer.stale: correct needs train.algorithm.tis_imp_ratio_cap, or old_log_probs=rollout: nothing else"
        " corrects the gradient of stale groups": (
            setup.train.buffer.stale == "correct"
            and algorithm.tis_imp_ratio_cap is None
            and algorithm.old_log_probs == "recompute"
        ),
        "train.algorithm.overlong.cache_length: must be at most max_length, which is rollout.response_length by"
        f" default: {limit}": overlong is not None and overlong.cache_length > (overlong.max_length or limit),
        "train.lora.dropout: needs train.algorithm.old_log_probs=recompute, which computes them without dropout": (
            lora is not None and lora.dropout > 0 and algorithm.old_log_probs == "rollout"
        ),
        "train.algorithm.target_kl: needs train.lora.dropout=0: dropout would count as movement of the policy": (
            lora is not None and lora.dropout > 0 and algorithm.target_kl is not None
        ),
        "train.lora.sync: adapters needs memory.level=1: at level 2 the engine loses the weights that they adapt": (
            lora is not None and lora.sync == "adapters" and setup.drops_weights
        ),
    }
