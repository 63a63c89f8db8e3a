"""The observer `mlflow`: a run of MLflow for each training."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from attrs import define, field, frozen

from turnwise import Observer, Resources
from turnwise.errors import ConfigError
from turnwise.observer import MetricsLogged, Place, TrainingStarted
from turnwise_experiment_trackers.tracker import flattened, keep_run_id, kept_run_id, require

_MAX_PARAM_CHARACTERS: Final = 500
_MAX_PARAMS_PER_CALL: Final = 100
_MAX_METRICS_PER_CALL: Final = 1000


@frozen(kw_only=True)
class MlflowConfig:
    """
    Options of `mlflow`.

    Attributes:
        tracking_uri: of the server or store; null is what `MLFLOW_TRACKING_URI` says, else MLflow's own default.
        experiment: that the run belongs to; made when there is none of this name.
        run_name: shown for the run; null lets MLflow choose one.
        tags: of the run.
    """

    tracking_uri: str | None = None
    experiment: str = "turnwise"
    run_name: str | None = None
    tags: Mapping[str, str] = field(factory=dict)


@define(eq=False)
class MlflowTracker(Observer):
    """
    Sends settings and numbers, through a client of its own: the global run of MLflow is left alone.

    Numbers travel in a thread of MLflow's; that they did not arrive is noticed at the next ones.
    """

    place: ClassVar[Place] = "driver"
    config: MlflowConfig
    _entities: Any = field(default=None, init=False)
    _client: Any = field(default=None, init=False)
    _run_id: str | None = field(default=None, init=False)
    _sent: list[Any] = field(factory=list, init=False)

    def open(self) -> None:
        """Ask the store for the experiment; `ConfigError` when it does not answer, before anything is trained."""
        library = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        try:
            self._client = library.MlflowClient(tracking_uri=self.config.tracking_uri)
            self._client.get_experiment_by_name(self.config.experiment)
        except (library.exceptions.MlflowException, OSError, ImportError) as error:
            where = self.config.tracking_uri or "the default store"
            raise ConfigError(f"observer mlflow: {where}: {' '.join(str(error).split())}") from error

    def on_training_started(self, event: TrainingStarted) -> None:
        """Begin a run, or go on with the one that the training had."""
        self._run_id = kept_run_id(event, "mlflow")
        if self._run_id is not None:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(self.config.experiment)
        where = (
            self._client.create_experiment(self.config.experiment) if experiment is None else experiment.experiment_id
        )
        run = self._client.create_run(where, run_name=self.config.run_name, tags=dict(self.config.tags))
        self._run_id = run.info.run_id
        keep_run_id(event, "mlflow", run.info.run_id)
        params = [
            self._entities.Param(name, value[:_MAX_PARAM_CHARACTERS]) for name, value in flattened(event.settings)
        ]
        for start in range(0, len(params), _MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS_PER_CALL])

    def on_metrics_logged(self, event: MetricsLogged) -> None:
        """Send the numbers of a step; raises what became of those before, if they did not arrive."""
        self._arrived()
        now_ms = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now_ms, event.step) for name, value in event.values.items()]
        for start in range(0, len(metrics), _MAX_METRICS_PER_CALL):
            part = metrics[start : start + _MAX_METRICS_PER_CALL]
            self._sent.append(self._client.log_batch(self._run_id, metrics=part, synchronous=False))

    def close(self) -> None:
        """End the run, waiting until all was sent."""
        run_id, self._run_id = self._run_id, None
        if run_id is not None:
            try:
                self._arrived()
            finally:
                self._client.set_terminated(run_id)

    def _arrived(self) -> None:
        sent, self._sent = self._sent, []
        for operation in sent:
            operation.wait()


def make_mlflow(config: MlflowConfig, resources: Resources) -> Observer:
    """Return the observer; `ConfigError` when MLflow is not installed."""
    require("mlflow")
    return MlflowTracker(config)
