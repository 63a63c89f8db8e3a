"""
The observer `otel`: exports OpenTelemetry spans of episodes, turns, generate calls, tool calls and rewards.

Spans go to an OTLP endpoint over HTTP. Attributes follow OpenTelemetry's semantic conventions for generative AI; the
names of other attributes start with ``turnwise.``. The spans of an episode are created at its end from the times of
its events, so they cost nothing while it runs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from attrs import frozen

from turnwise import Resources
from turnwise.errors import ConfigError
from turnwise.events.observer import EpisodeStarted, ToolFinished, TurnFinished
from turnwise.types import Status
from turnwise_observability.config import ENDPOINTS, INSTALL_OTEL, OtelConfig
from turnwise_observability.span_texts import EpisodeTexts, SpanTexts, TurnTexts
from turnwise_observability.timeline import EpisodeTimeline, TimelineObserver

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Tracer


def make_otel(config: OtelConfig, resources: Resources) -> OtelObserver:
    """
    Return the observer; spans have the id on the hub, or the folder name, of the model as model name.

    Raises:
        ConfigError: there is no endpoint.
    """
    _check_endpoint(config)
    model = resources.model
    return OtelObserver(config, model.name or ("" if model.path is None else model.path.name))


def _check_endpoint(config: OtelConfig) -> None:
    if config.endpoint is None and not any(os.environ.get(name) for name in ENDPOINTS):
        raise ConfigError(f"observer otel: no endpoint: set its option endpoint or the variable {ENDPOINTS[1]}")


class OtelObserver(TimelineObserver):
    """
    Exports spans.

    `open` raises `ConfigError` if there is no endpoint or a package is missing. Tests pass a `processor` that keeps
    the spans instead of sending them.
    """

    def __init__(self, config: OtelConfig, model: str = "", processor: SpanProcessor | None = None) -> None:
        super().__init__()
        self._config = config
        self._model = model
        self._processor = processor
        self._provider: TracerProvider | None = None

    def open(self) -> None:
        try:
            from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
        except ModuleNotFoundError as error:
            raise ConfigError(f"observer otel: needs {error.name}: {INSTALL_OTEL}") from error
        resource = Resource.create({SERVICE_NAME: self._config.service_name}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor or self._make_processor())

    def close(self) -> None:
        super().close()
        if self._provider is not None:
            self._provider.shutdown()
            self._provider = None

    def end_timeline(self, timeline: EpisodeTimeline) -> None:
        if self._provider is not None:
            texts = SpanTexts(self._config.text_limit).of(timeline) if self._config.texts else EpisodeTexts()
            _SpanTree(self._provider.get_tracer("turnwise"), self._model, timeline.start, texts).export(timeline)

    def _make_processor(self) -> SpanProcessor:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        endpoint = self._config.endpoint
        _check_endpoint(self._config)
        if endpoint is not None and not endpoint.endswith("/v1/traces"):
            endpoint = f"{endpoint.rstrip('/')}/v1/traces"
        # All spans of an episode are queued at once, and many episodes can end together; a full queue drops spans.
        return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint), max_queue_size=65_536)


@frozen
class _SpanTree:
    """Creates the spans of an episode, each as a child of the span that contains it."""

    tracer: Tracer
    model: str
    start: EpisodeStarted
    texts: EpisodeTexts

    def export(self, timeline: EpisodeTimeline) -> None:
        from opentelemetry.trace import Status as SpanStatus
        from opentelemetry.trace import StatusCode, set_span_in_context

        start, reward, result = self.start, timeline.reward, timeline.result
        attributes = {**_names(start), **_episode_attributes(timeline), **self.texts.episode}
        episode = self.tracer.start_span("episode", attributes=attributes, start_time=_ns(start.started_at))
        children = set_span_in_context(episode)
        turns = timeline.turns_with_tools()
        texts = self.texts.turns or [TurnTexts()] * len(turns)
        for number, ((turn, tools), its_texts) in enumerate(zip(turns, texts, strict=True)):
            self._turn(children, number, turn, tools, its_texts)
        if reward is not None:
            self._span("reward", children, reward.started_at, reward.seconds, {"turnwise.reward": reward.reward})
        if result is None or result.status is Status.FAILED:
            text = "the episode did not end" if result is None or result.fault is None else result.fault.message
            episode.set_status(SpanStatus(StatusCode.ERROR, text))
        episode.end(_ns(timeline.ended_at))

    def _turn(
        self, episode: Context, number: int, turn: TurnFinished, tools: list[ToolFinished], texts: TurnTexts
    ) -> None:
        tools_end_at = [tool.started_at + tool.seconds for tool in tools]
        seconds = max([turn.started_at + turn.seconds, *tools_end_at]) - turn.started_at
        inside = self._span("turn", episode, turn.started_at, seconds, {"turnwise.turn": number})
        model = {"gen_ai.request.model": self.model} if self.model else {}
        self._span(
            "generate", inside, turn.started_at, turn.seconds, {**_generate_attributes(turn), **model, **texts.generate}
        )
        # Calls that run at the same time start in the order in which the agent made them, and end in any order.
        for index, tool in enumerate(sorted(tools, key=lambda each: each.started_at)):
            text = texts.tools[index] if texts.tools else {}
            self._span("tool", inside, tool.started_at, tool.seconds, {**_tool_attributes(tool), **text})

    def _span(
        self, name: str, parent: Context, started_at: float, seconds: float, attributes: dict[str, Any]
    ) -> Context:
        """Create a finished span and return the context for its children."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        kind = SpanKind.CLIENT if name == "generate" else SpanKind.INTERNAL
        span = self.tracer.start_span(name, parent, kind, _names(self.start) | attributes, start_time=_ns(started_at))
        span.end(_ns(started_at + seconds))
        return set_span_in_context(span, parent)


def _ns(at_s: float) -> int:
    whole_s, rest_s = divmod(at_s, 1.0)  # Unix nanoseconds exceed the precision of a float
    return int(whole_s) * 10**9 + round(rest_s * 1e9)


def _names(start: EpisodeStarted) -> dict[str, Any]:
    """Return the names that every span of an attempt has, so that a search for one of them finds each span."""
    return {"turnwise.key": start.key, "turnwise.uid": start.uid, "turnwise.worker": start.worker}


def _episode_attributes(timeline: EpisodeTimeline) -> dict[str, Any]:
    start, result = timeline.start, timeline.result
    attributes: dict[str, object] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": start.agent_name,
        "gen_ai.conversation.id": start.uid,
        "turnwise.global_step": start.global_step,
        "turnwise.validation": start.validation,
        "turnwise.sample_index": start.task.sample_index,
        "turnwise.rollout_n": start.rollout_n,
    }
    if result is None:
        return {**attributes, "turnwise.status": "unfinished"}
    attributes["turnwise.status"] = str(result.status)
    attributes["turnwise.replicas"] = list(result.metrics.replicas)
    if result.reward is not None:
        attributes["turnwise.reward"] = result.reward
    if result.fault is not None:
        attributes |= {"error.type": result.fault.kind, "turnwise.fault.owner": result.fault.owner}
    for origin, count in result.metrics.num_tokens.items():
        attributes[f"turnwise.num_tokens.{origin}"] = count
    return attributes


def _generate_attributes(turn: TurnFinished) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "turnwise",
        "gen_ai.usage.input_tokens": turn.num_context_tokens,
        "gen_ai.usage.output_tokens": turn.num_new_tokens,
        "gen_ai.usage.cache_read.input_tokens": turn.num_cached_tokens,
        "gen_ai.response.finish_reasons": [str(turn.finish_reason)],
        "turnwise.replica": turn.replica,
    }


def _tool_attributes(tool: ToolFinished) -> dict[str, Any]:
    attributes: dict[str, object] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool.tool,
        "turnwise.num_characters": tool.num_characters,
    }
    return {**attributes, "error.type": "tool_error"} if tool.error else attributes
