"""The observer `mlflow`: one MLflow run for each training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from attrs import define, field, frozen

from turnwise import Observer, Resources
from turnwise.errors import ConfigError
from turnwise.events.observer import MetricsLogged, Place, TrainingStarted
from turnwise_experiment_trackers.tracker import check_installed, flatten, load_run_id, save_run_id

_MAX_PARAM_CHARACTERS: Final = 500
_MAX_PARAMS_PER_CALL: Final = 100
_MAX_METRICS_PER_CALL: Final = 1000


@frozen(kw_only=True)
class MlflowConfig:
    """
    Options of `mlflow`.

    Attributes:
        tracking_uri: server or store; null uses `MLFLOW_TRACKING_URI`, or else MLflow's default.
        experiment: MLflow experiment of the run; created if it is missing.
        run_name: display name; null lets MLflow choose one.
        tags: tags of the run.
    """

    tracking_uri: str | None = None
    experiment: str = "turnwise"
    run_name: str | None = None
    tags: Mapping[str, str] = field(factory=dict)


@define(eq=False)
class MlflowTracker(Observer):
    """
    Logs settings as parameters and metrics by step, through a separate client: MLflow's global run is untouched.

    MLflow sends metrics in a background thread; the next call or `close` raises the error of a failed write.
    """

    place: ClassVar[Place] = "driver"
    config: MlflowConfig
    _client: Any = field(default=None, init=False)
    _run_id: str | None = field(default=None, init=False)
    _writes: list[Any] = field(factory=list, init=False)

    def open(self) -> None:
        import mlflow

        try:
            self._client = mlflow.MlflowClient(tracking_uri=self.config.tracking_uri)
            # The client connects lazily, so ask for something: an unreachable store must fail before training starts.
            self._client.get_experiment_by_name(self.config.experiment)
        except (mlflow.exceptions.MlflowException, OSError, ImportError) as error:
            store = self.config.tracking_uri or "the default store"
            raise ConfigError(f"observer mlflow: {store}: {' '.join(str(error).split())}") from error

    def on_training_started(self, event: TrainingStarted) -> None:
        from mlflow.entities import Param

        self._run_id = load_run_id(event, "mlflow")
        if self._run_id is not None:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(self.config.experiment)
        experiment_id = (
            self._client.create_experiment(self.config.experiment) if experiment is None else experiment.experiment_id
        )
        run = self._client.create_run(experiment_id, run_name=self.config.run_name, tags=dict(self.config.tags))
        self._run_id = run.info.run_id
        save_run_id(event, "mlflow", run.info.run_id)
        params = [Param(name, value[:_MAX_PARAM_CHARACTERS]) for name, value in flatten(event.settings)]
        for start in range(0, len(params), _MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS_PER_CALL])

    def on_metrics_logged(self, event: MetricsLogged) -> None:
        from mlflow.entities import Metric

        self._wait_for_writes()
        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, event.step) for name, value in event.values.items()]
        for start in range(0, len(metrics), _MAX_METRICS_PER_CALL):
            part = metrics[start : start + _MAX_METRICS_PER_CALL]
            self._writes.append(self._client.log_batch(self._run_id, metrics=part, synchronous=False))

    def close(self) -> None:
        run_id, self._run_id = self._run_id, None
        if run_id is not None:
            try:
                self._wait_for_writes()
            finally:
                self._client.set_terminated(run_id)

    def _wait_for_writes(self) -> None:
        writes, self._writes = self._writes, []
        for write in writes:
            write.wait()


def make_mlflow(config: MlflowConfig, resources: Resources) -> Observer:
    """Build the observer; raise `ConfigError` if MLflow is not installed."""
    check_installed("mlflow")
    return MlflowTracker(config)
