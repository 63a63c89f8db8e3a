"""
The observer `otel`: OpenTelemetry spans of episodes, their turns, generate calls, tool calls and rewards.

Spans go to an OTLP endpoint over HTTP. Without one nothing here is loaded. Attributes follow the semantic conventions
for generative AI where they fit; what they have no name for begins with ``turnwise.``. An episode's spans are made when
it has ended, with the times of its events, so that they cost nothing while it runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog
from attrs import frozen

from turnwise.errors import ConfigError
from turnwise.observer import ToolFinished, TurnFinished
from turnwise.timeline import EpisodeTimeline, TimelineObserver
from turnwise.types import Status

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Tracer

SPANS: Final = "otel"
"""Name of the observer in configs."""

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@frozen(kw_only=True)
class SpansConfig:
    """
    Options of `otel`.

    Attributes:
        endpoint: base URL of an OTLP receiver over HTTP, such as `http://127.0.0.1:4318`; null takes it from the
            variables `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` and `OTEL_EXPORTER_OTLP_ENDPOINT` of the environment.
        service_name: what the receiver files the spans under, unless `OTEL_SERVICE_NAME` is set.
    """

    endpoint: str | None = None
    service_name: str = "turnwise"

    def __attrs_post_init__(self) -> None:
        """Refuse what is no URL."""
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"'endpoint' must begin with http:// or https://: {self.endpoint!r}")


def spans_wanted(named: Iterable[str]) -> bool:
    """
    Return whether the environment asks for spans that the config does not name.

    It does by an OTLP endpoint, unless `OTEL_SDK_DISABLED` is true or `OTEL_TRACES_EXPORTER` is none. The endpoint may
    be meant for other programs, so a missing package is a warning and no error.
    """
    asked = any(os.environ.get(name) for name in _ENDPOINTS)
    refused = (
        os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    )
    if not asked or refused or SPANS in named:
        return False
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401 - whether they are there
    except ModuleNotFoundError as error:
        structlog.get_logger().warning(
            "no spans, though an OTLP endpoint is set", missing=error.name, install="pip install 'turnwise[otel]'"
        )
        return False
    return True


class Spans(TimelineObserver):
    """
    Exports spans; `open` raises `ConfigError` without an endpoint or without the packages.

    A test may give a `processor` that keeps the spans in place of sending them.
    """

    def __init__(self, config: SpansConfig, model: str = "", processor: SpanProcessor | None = None) -> None:
        super().__init__()
        self._config = config
        self._model = model
        self._processor = processor
        self._provider: TracerProvider | None = None

    def open(self) -> None:
        """Get ready to send."""
        try:
            from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
        except ModuleNotFoundError as error:
            raise ConfigError(f"the observer otel needs {error.name}: pip install 'turnwise[otel]'") from error
        resource = Resource.create({SERVICE_NAME: self._config.service_name}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor or self._sender())

    def close(self) -> None:
        """Send what is left."""
        super().close()
        if self._provider is not None:
            self._provider.shutdown()
            self._provider = None

    def on_timeline(self, timeline: EpisodeTimeline) -> None:
        """Make the spans of an episode."""
        if self._provider is not None:
            _Tree(self._provider.get_tracer("turnwise"), self._model).grow(timeline)

    def _sender(self) -> SpanProcessor:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        endpoint = self._config.endpoint
        if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINTS):
            raise ConfigError(f"the observer otel has no endpoint: set it, or {_ENDPOINTS[1]} in the environment")
        if endpoint is not None and not endpoint.endswith("/v1/traces"):
            endpoint = f"{endpoint.rstrip('/')}/v1/traces"
        # An episode's spans come all at once, and many episodes may end together.
        return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint), max_queue_size=65_536)


@frozen
class _Tree:
    """Makes the spans of episodes, each inside that of what it is part of."""

    tracer: Tracer
    model: str

    def grow(self, timeline: EpisodeTimeline) -> None:
        """Make an episode's spans."""
        from opentelemetry.trace import Status as SpanStatus
        from opentelemetry.trace import StatusCode, set_span_in_context

        start, reward, result = timeline.start, timeline.reward, timeline.result
        episode = self.tracer.start_span("episode", attributes=_episode(timeline), start_time=_ns(start.started_at))
        inside = set_span_in_context(episode)
        for number, (turn, tools) in enumerate(timeline.rounds()):
            self._turn(inside, number, turn, tools)
        if reward is not None:
            self._span("reward", inside, reward.started_at, reward.seconds, {"turnwise.reward": reward.reward})
        if result is None or result.status is Status.FAILED:
            text = "the episode did not end" if result is None or result.fault is None else result.fault.message
            episode.set_status(SpanStatus(StatusCode.ERROR, text))
        episode.end(_ns(timeline.ended_at))

    def _turn(self, episode: Context, number: int, turn: TurnFinished, tools: list[ToolFinished]) -> None:
        tools_end_at = [tool.started_at + tool.seconds for tool in tools]
        seconds = max([turn.started_at + turn.seconds, *tools_end_at]) - turn.started_at
        inside = self._span("turn", episode, turn.started_at, seconds, {"turnwise.turn": number})
        model = {"gen_ai.request.model": self.model} if self.model else {}
        self._span("generate", inside, turn.started_at, turn.seconds, {**_generate(turn), **model})
        for tool in tools:
            self._span("tool", inside, tool.started_at, tool.seconds, _tool(tool))

    def _span(
        self, name: str, parent: Context, started_at: float, seconds: float, attributes: Mapping[str, Any]
    ) -> Context:
        """Make a whole span and return the context of what is inside it."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        kind = SpanKind.CLIENT if name == "generate" else SpanKind.INTERNAL
        span = self.tracer.start_span(name, parent, kind, attributes, start_time=_ns(started_at))
        span.end(_ns(started_at + seconds))
        return set_span_in_context(span, parent)


def _ns(at_s: float) -> int:
    whole_s, rest_s = divmod(at_s, 1.0)  # Unix nanoseconds do not fit a float
    return int(whole_s) * 10**9 + round(rest_s * 1e9)


def _episode(timeline: EpisodeTimeline) -> dict[str, Any]:
    start, result = timeline.start, timeline.result
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": start.agent_name,
        "gen_ai.conversation.id": start.uid,
        "turnwise.global_step": start.global_step,
        "turnwise.validation": start.validation,
        "turnwise.worker": start.worker,
    }
    if result is None:
        return {**attributes, "turnwise.status": "unfinished"}
    attributes["turnwise.status"] = str(result.status)
    if result.reward is not None:
        attributes["turnwise.reward"] = result.reward
    if result.fault is not None:
        attributes |= {"error.type": result.fault.kind, "turnwise.fault.owner": result.fault.owner}
    for origin, count in result.metrics.num_tokens.items():
        attributes[f"turnwise.num_tokens.{origin}"] = count
    return attributes


def _generate(turn: TurnFinished) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "turnwise",
        "gen_ai.usage.input_tokens": turn.num_context_tokens,
        "gen_ai.usage.output_tokens": turn.num_new_tokens,
        "gen_ai.usage.cache_read.input_tokens": turn.num_cached_tokens,
        "gen_ai.response.finish_reasons": [str(turn.finish_reason)],
        "turnwise.replica": turn.replica,
    }


def _tool(tool: ToolFinished) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool.tool,
        "turnwise.num_characters": tool.num_characters,
    }
    return {**attributes, "error.type": "tool_error"} if tool.error else attributes
