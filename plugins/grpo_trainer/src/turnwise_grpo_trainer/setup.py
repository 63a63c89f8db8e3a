"""From a config file to all that a training is made of; what cannot work is refused here, in one line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from turnwise import RolloutManager, Task, load_resolved, manager_of, structure, tasks_of
from turnwise.errors import ConfigError
from turnwise.observer import Observer
from turnwise.protocols import ModelSpec
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.trainers import Trainer


@frozen
class Setup:
    """
    What is trained, on what, and how.

    Attributes:
        run: the run config, resolved.
        host: with the plugins loaded.
        train: its `train` section.
        spec: the model.
        tasks: to train on.
        validation_tasks: held out; none when the config names none.
    """

    run: Any
    host: Any
    train: TrainConfig
    spec: ModelSpec
    tasks: Sequence[Task]
    validation_tasks: Sequence[Task]

    @property
    def group_size(self) -> int:
        """Episodes of a group."""
        return int(self.run.rollout.n)

    def described(self) -> dict[str, Any]:
        """Return what is trained and how, as plain values for those who keep records."""
        run = self.run
        parts = {kind: getattr(run, kind).name for kind in ("engine", "agent", "reward", "runtime")}
        return {
            "model": str(self.spec.path),
            **parts,
            "rollout": asdict(run.rollout),
            "train": asdict(self.train),
        }

    def manager(self, observers: Iterable[Observer] = ()) -> RolloutManager:
        """Build the rollout; nothing is started."""
        return manager_of(self.run, self.host, observers=observers)

    def trainer(self) -> Trainer:
        """Load the models, in this process or in several."""
        if self.train.sharding.num_processes > 1:
            from turnwise_grpo_trainer.ray_trainer import RayTrainer

            return RayTrainer.start(self)
        from turnwise_grpo_trainer.sharding import local_trainer

        return local_trainer(self)


def read_setup(path: str, overrides: Iterable[str] = (), *, needs_train: bool = True) -> Setup:
    """
    Read and check a config.

    Raises:
        ConfigError, DataError, PluginError: one line for each thing that cannot be.
    """
    run, host = load_resolved(path, overrides)
    if needs_train and not run.train:
        raise ConfigError(f"{path}: train: missing; the section says how to train, see turnwise train --help")
    train: TrainConfig = _structured(run.train, path)
    validation_tasks = _validation_tasks(run)
    setup = Setup(run, host, train, run.model_spec(), tasks_of(run) if needs_train else [], validation_tasks)
    if needs_train:
        _check(setup, path)
    return setup


def _structured(section: Any, path: str) -> TrainConfig:
    try:
        train: TrainConfig = structure(dict(section), TrainConfig, path="train")
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error
    return train


def _validation_tasks(run: Any) -> list[Task]:
    if run.data.validation_path is None:
        return []
    tasks = tasks_of(evolve(run, rollout=evolve(run.rollout, validation=True)))
    return list(tasks)


def _check(setup: Setup, path: str) -> None:
    run, train = setup.run, setup.train
    sampling = run.rollout.sampling
    grouped = train.algorithm.adv_estimator in ("grpo", "dr_grpo", "rloo")
    wrong = {
        "rollout.n: must be at least 2: a group of one has no baseline": grouped and run.rollout.n < 2,
        "train.buffer.dynamic_sampling: needs rollout.n of at least 2: the rewards of a group of one never differ": (
            train.buffer.dynamic_sampling and run.rollout.n < 2
        ),
        "rollout.sampling.temperature: must be above 0 to train": sampling.temperature == 0,
        "rollout.sampling: top_p must be 1 and top_k -1 to train: the trainer's log-probabilities are those of the"
        " whole distribution": sampling.top_p != 1 or sampling.top_k != -1,
        f"train.tasks_per_step: {train.tasks_per_step} is more than the {len(setup.tasks)} tasks": (
            train.tasks_per_step > len(setup.tasks)
        ),
        "train.algorithm.use_kl_in_reward: needs kl_loss_coef above 0": (
            train.algorithm.use_kl_in_reward and train.algorithm.kl_loss_coef == 0
        ),
        "reward: missing; there is nothing to learn from": run.reward is None,
        "train.buffer.max_groups: must be at least tasks_per_step": (
            (train.buffer.max_groups or train.tasks_per_step) < train.tasks_per_step
        ),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"{path}: {text}")


def checked_out(out: Path, *, overwrite: bool, resume: bool) -> Path:
    """Return the folder of a training, made when missing; `ConfigError` when it holds another that must stay."""
    from turnwise_grpo_trainer.checkpoints import CHECKPOINTS_FOLDER, checkpoints_of, mend
    from turnwise_grpo_trainer.metric_log import METRICS_FILE

    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: not a folder")
    mend(out)
    held = next((out / name for name in (METRICS_FILE, CHECKPOINTS_FOLDER) if (out / name).exists()), None)
    if held is not None and not (overwrite or resume):
        raise ConfigError(f"--out {out}: holds another training ({held.name}); add --resume to go on, or --overwrite")
    if resume and not checkpoints_of(out):
        raise ConfigError(f"--resume: {out} has no checkpoint")
    out.mkdir(parents=True, exist_ok=True)
    return out
