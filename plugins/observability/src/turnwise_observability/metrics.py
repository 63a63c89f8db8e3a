"""
The metrics of a run, computed from events.

`METRICS` lists all metrics. `turnwise_observability.metrics_endpoint` serves them over HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import define, field, frozen

from turnwise.events.observer import (
    ActorRestarted,
    EpisodesRetried,
    EpisodeStarted,
    LimitReached,
    MemorySwitched,
    MetricsLogged,
    Observer,
    RequestRouted,
    RewardFinished,
    RunStarted,
    RunWaiting,
    ToolFinished,
    TrainingStarted,
    TurnFinished,
    WeightsUpdated,
)
from turnwise.record.result import EpisodeResult

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Kind = Literal["counter", "gauge", "histogram", "summary"]

_SECONDS: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
)
_TURNS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_TOKENS: Final = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
_CHARACTERS: Final = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
_RATIOS: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


@frozen
class Metric:
    """
    One metric.

    Attributes:
        name: the scraped name without the suffixes `_bucket`, `_sum` and `_count`.
        kind: type of the metric in Prometheus.
        help: one line, with the unit.
        labels: names of the labels.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = _SECONDS


METRICS: Final = (
    Metric("turnwise_episodes_requested_total", "counter", "Episodes requested by runs."),
    Metric("turnwise_quiet_seconds", "gauge", "Seconds without an event while everything waits; 0 when it goes on."),
    Metric("turnwise_episodes_in_flight", "gauge", "Episodes that have started and not ended."),
    Metric(
        "turnwise_episodes_total",
        "counter",
        "Episodes that ended, by status and by owner of the fault (none, agent, tool, engine, ...).",
        ("status", "fault_owner"),
    ),
    Metric("turnwise_episode_seconds", "histogram", "Seconds of an episode, from its first step to its end."),
    Metric("turnwise_episode_llm_seconds", "histogram", "Seconds that an episode waited for the model."),
    Metric(
        "turnwise_episode_tool_seconds", "histogram", "Seconds that an episode waited for tools; parallel calls add up."
    ),
    Metric("turnwise_episode_turns", "histogram", "Turns of the model in an episode.", (), _TURNS),
    Metric(
        "turnwise_episode_mask_ratio",
        "histogram",
        "Sampled tokens divided by response tokens.",
        (),
        _RATIOS,
    ),
    Metric(
        "turnwise_episode_tool_output_tokens",
        "histogram",
        "Tokens that the results of tools added to an episode; for agents that record tool_output_tokens.",
        (),
        _TOKENS,
    ),
    Metric(
        "turnwise_programs_passed_total",
        "counter",
        "Programs of the model that ran without error; for agents that record programs_passed.",
    ),
    Metric("turnwise_episode_reward", "summary", "Rewards of scored episodes."),
    Metric("turnwise_reward_seconds", "histogram", "Seconds to score an episode."),
    Metric(
        "turnwise_tokens_total",
        "counter",
        "Tokens of ended episodes by origin: prompt, action, observation, forced, replayed.",
        ("origin",),
    ),
    Metric("turnwise_turns_total", "counter", "Generate calls that returned, counted as they return.", ("replica",)),
    Metric("turnwise_sampled_tokens_total", "counter", "Sampled tokens, counted as they return.", ("replica",)),
    Metric("turnwise_sampled_tokens_per_second", "gauge", "Sampled tokens per second over the last 30 s."),
    Metric("turnwise_context_tokens_total", "counter", "Context tokens sent to engines.", ("replica",)),
    Metric("turnwise_cached_tokens_total", "counter", "Context tokens read from a prefix cache.", ("replica",)),
    Metric(
        "turnwise_generate_seconds", "histogram", "Seconds of a generate call, measured in the worker.", ("replica",)
    ),
    Metric("turnwise_tool_seconds", "histogram", "Seconds of a tool call.", ("tool",)),
    Metric(
        "turnwise_tool_calls_total",
        "counter",
        "Tool calls; error is true if the model got an error as the result.",
        ("tool", "error"),
    ),
    Metric("turnwise_tool_output_characters", "histogram", "Characters of a tool's result.", ("tool",), _CHARACTERS),
    Metric(
        "turnwise_routed_requests_total",
        "counter",
        "Requests by routing decision: first of an episode, sticky or migrated; the router defines the reasons.",
        ("kind", "reason"),
    ),
    Metric(
        "turnwise_limit_reached_total",
        "counter",
        "Times that a limit of the config, such as max_parallel_calls, delayed or rejected something.",
        ("limit",),
    ),
    Metric("turnwise_restarts_total", "counter", "Restarts of workers and replicas.", ("kind",)),
    Metric("turnwise_episode_retries_total", "counter", "Episodes restarted because their worker died."),
    Metric("turnwise_weight_sync_seconds", "histogram", "Seconds of a weight update of one replica.", ("replica",)),
    Metric("turnwise_weight_version", "gauge", "Weight version of a replica.", ("replica",)),
    Metric(
        "turnwise_memory_switch_seconds",
        "histogram",
        "Seconds of a stage of a memory switch, such as sleep.",
        ("stage",),
    ),
    Metric(
        "turnwise_memory_before_bytes",
        "gauge",
        "Device memory in use before the last such stage.",
        ("stage", "replica"),
    ),
    Metric(
        "turnwise_memory_after_bytes", "gauge", "Device memory in use after the last such stage.", ("stage", "replica")
    ),
    Metric(
        "turnwise_trainings_total",
        "counter",
        "Trainings started; resumed is true if one continues from a checkpoint.",
        ("resumed",),
    ),
    Metric("turnwise_training_step", "gauge", "Last step that a trainer logged."),
    Metric("turnwise_training_value", "gauge", "Last value that a trainer logged, by name.", ("name",)),
)
"""All metrics of a run."""

_TURN_METRICS: Final = (
    "turns_total",
    "sampled_tokens_total",
    "context_tokens_total",
    "cached_tokens_total",
    "generate_seconds",
)
_MAX_TOOLS: Final = 64
_OTHER_TOOL: Final = "other"
_WINDOW_S: Final = 30.0
_PARALLEL_CALLS: Final = "max_parallel_calls"


@define(eq=False)
class TokenRate:
    """Tokens per second over a sliding window; thread-safe, because scrapes come from threads of the endpoint."""

    window_s: float = _WINDOW_S
    clock: Callable[[], float] = time.monotonic
    _recent: deque[tuple[float, int]] = field(factory=deque, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def add(self, num_tokens: int) -> None:
        """Count tokens that arrive now."""
        with self._lock:
            self._recent.append((self.clock(), num_tokens))

    def per_second(self) -> float:
        """Return the rate over the window, or since its first tokens if that is shorter, but at least 1 s."""
        now = self.clock()
        with self._lock:
            while self._recent and self._recent[0][0] < now - self.window_s:
                self._recent.popleft()
            if not self._recent:
                return 0.0
            return sum(tokens for _at, tokens in self._recent) / max(1.0, now - self._recent[0][0])


class MetricsObserver(Observer):
    """Updates all metrics of `METRICS` in a registry from the events of a run."""

    place = "driver"

    def __init__(self, registry: CollectorRegistry) -> None:
        import prometheus_client as prometheus

        kinds: dict[Kind, Any] = {
            "counter": prometheus.Counter,
            "gauge": prometheus.Gauge,
            "histogram": prometheus.Histogram,
            "summary": prometheus.Summary,
        }
        self._metrics: dict[str, Any] = {}
        for metric in METRICS:
            more = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
            made = kinds[metric.kind](metric.name, metric.help, metric.labels, registry=registry, **more)
            self._metrics[metric.name.removeprefix("turnwise_")] = made
        self._rate = TokenRate()
        self._metrics["sampled_tokens_per_second"].set_function(self._rate.per_second)
        self._in_flight: set[tuple[str, int, bool]] = set()
        self._tools: set[str] = set()
        self._replicas: dict[int, tuple[Any, ...]] = {}

    def on_run_started(self, event: RunStarted) -> None:
        self._metrics["episodes_requested_total"].inc(event.num_episodes)

    def on_run_waiting(self, event: RunWaiting) -> None:
        self._metrics["quiet_seconds"].set(event.seconds)

    def on_episode_started(self, event: EpisodeStarted) -> None:
        # A restarted episode is still one episode, so a set of keys and not a counter.
        self._in_flight.add((event.uid, event.global_step, event.validation))
        self._metrics["episodes_in_flight"].set(len(self._in_flight))

    def on_turn_finished(self, event: TurnFinished) -> None:
        self._rate.add(event.num_new_tokens)
        turns, sampled, context, cached, seconds = self._turn_metrics(event.replica)
        turns.inc()
        sampled.inc(event.num_new_tokens)
        context.inc(event.num_context_tokens)
        cached.inc(event.num_cached_tokens)
        seconds.observe(event.seconds)

    def on_tool_finished(self, event: ToolFinished) -> None:
        tool = self._tool_label(event)
        self._metrics["tool_seconds"].labels(tool).observe(event.seconds)
        self._metrics["tool_calls_total"].labels(tool, str(event.error).lower()).inc()
        self._metrics["tool_output_characters"].labels(tool).observe(event.num_characters)

    def on_reward_finished(self, event: RewardFinished) -> None:
        self._metrics["reward_seconds"].observe(event.seconds)

    def on_request_routed(self, event: RequestRouted) -> None:
        self._metrics["routed_requests_total"].labels(event.kind, event.reason).inc()

    def on_limit_reached(self, event: LimitReached) -> None:
        self._metrics["limit_reached_total"].labels(event.limit).inc(event.count)

    def on_actor_restarted(self, event: ActorRestarted) -> None:
        self._metrics["restarts_total"].labels(event.kind).inc()

    def on_episodes_retried(self, event: EpisodesRetried) -> None:
        self._metrics["episode_retries_total"].inc(event.count)

    def on_weights_updated(self, event: WeightsUpdated) -> None:
        replica = str(event.replica)
        self._metrics["weight_sync_seconds"].labels(replica).observe(event.seconds)
        self._metrics["weight_version"].labels(replica).set(event.version)

    def on_memory_switched(self, event: MemorySwitched) -> None:
        self._metrics["memory_switch_seconds"].labels(event.stage).observe(event.seconds)
        labels = event.stage, str(event.replica)
        self._metrics["memory_before_bytes"].labels(*labels).set(event.bytes_before)
        self._metrics["memory_after_bytes"].labels(*labels).set(event.bytes_after)

    def on_training_started(self, event: TrainingStarted) -> None:
        self._metrics["trainings_total"].labels(str(event.resumed).lower()).inc()

    def on_metrics_logged(self, event: MetricsLogged) -> None:
        self._metrics["training_step"].set(event.step)
        for name, value in event.values.items():
            self._metrics["training_value"].labels(name).set(value)

    def on_episode_finished(self, event: EpisodeResult) -> None:
        self._in_flight.discard((event.uid, event.global_step, event.validation))
        self._metrics["episodes_in_flight"].set(len(self._in_flight))
        owner = event.fault.owner if event.fault else "none"
        self._metrics["episodes_total"].labels(str(event.status), owner).inc()
        metrics = event.metrics
        self._metrics["episode_seconds"].observe(metrics.total_s)
        self._metrics["episode_llm_seconds"].observe(metrics.llm_s)
        self._metrics["episode_tool_seconds"].observe(metrics.tool_s)
        self._metrics["episode_turns"].observe(metrics.num_turns)
        self._metrics["episode_mask_ratio"].observe(metrics.mask_ratio)
        for origin, count in metrics.num_tokens.items():
            self._metrics["tokens_total"].labels(origin).inc(count)
        if event.reward is not None:
            self._metrics["episode_reward"].observe(event.reward)
        if (tokens := metrics.extra.get("tool_output_tokens")) is not None:
            self._metrics["episode_tool_output_tokens"].observe(tokens)
        self._metrics["programs_passed_total"].inc(metrics.extra.get("programs_passed", 0.0))
        if hits := metrics.extra.get(f"{_PARALLEL_CALLS}_hit"):
            self._metrics["limit_reached_total"].labels(_PARALLEL_CALLS).inc(hits)

    def _turn_metrics(self, replica: int) -> tuple[Any, ...]:
        """Return the metrics of a turn for a replica; cached, because a look-up by label costs more than an update."""
        if replica not in self._replicas:
            self._replicas[replica] = tuple(self._metrics[name].labels(str(replica)) for name in _TURN_METRICS)
        return self._replicas[replica]

    def _tool_label(self, event: ToolFinished) -> str:
        """Return the tool's name as a label, or `other` for names that never worked or exceed the limit."""
        # A model can call a tool by any name, and each label value costs memory for the rest of the run.
        if not event.error and len(self._tools) < _MAX_TOOLS:
            self._tools.add(event.tool)
        return event.tool if event.tool in self._tools else _OTHER_TOOL
