"""Spans and their attributes, and the environment; `tests/test_observed_runs.py` has a real receiver."""

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from turnwise.errors import ConfigError
from turnwise.events.observer import EpisodeStarted, RewardFinished, ToolFinished, TurnFinished
from turnwise.record.result import EpisodeResult
from turnwise.types import EpisodeMetrics, Fault, FinishReason, Status, Task, TrajectoryScore
from turnwise_observability.config import OtelConfig, is_enabled
from turnwise_observability.otel import OtelObserver

TASK = Task(messages=({"role": "user", "content": "x"},), uid="t")
AT = 1_700_000_000.0
VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_EXPORTER",
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter):
    made = OtelObserver(OtelConfig(), "tiny", SimpleSpanProcessor(exporter))
    made.open()
    yield made
    made.close()


def start(spans):
    spans.on_episode_started(
        EpisodeStarted(uid="t/0", task=TASK, agent_name="a", key="k", global_step=3, worker="worker 1", started_at=AT)
    )


def turn(spans, at, lasts):
    spans.on_turn_finished(
        TurnFinished(
            uid="t/0",
            num_context_tokens=50,
            num_new_tokens=20,
            num_cached_tokens=30,
            finish_reason=FinishReason.LENGTH,
            seconds=lasts,
            key="k",
            replica=2,
            started_at=AT + at,
        )
    )


def tool(spans, at, lasts, error=False):
    spans.on_tool_finished(
        ToolFinished(uid="t/0", tool="calc", seconds=lasts, error=error, num_characters=4, key="k", started_at=AT + at)
    )


def test_a_tree_with_times_and_attributes(spans, exporter):
    """A turn contains its generate call and the tool calls after it; attributes follow the conventions."""
    start(spans)
    turn(spans, 0.0, 1.0)
    tool(spans, 1.0, 0.5)
    tool(spans, 1.0, 0.25, error=True)
    turn(spans, 1.5, 0.5)
    spans.on_reward_finished(RewardFinished(uid="t/0", reward=0.5, seconds=0.125, key="k", started_at=AT + 2))
    assert exporter.get_finished_spans() == ()
    metrics = EpisodeMetrics(total_s=2.25, num_tokens={"action": 40})
    spans.on_episode_finished(
        EpisodeResult(
            task=TASK, global_step=3, status=Status.COMPLETED, metrics=metrics, scores=(TrajectoryScore(value=0.5),)
        )
    )
    made = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in made}

    shown = [
        (
            span.name,
            names[span.parent.span_id] if span.parent else None,
            (span.start_time - int(AT) * 10**9) / 1e9,
            (span.end_time - int(AT) * 10**9) / 1e9,
        )
        for span in made
    ]
    assert shown == [
        ("turn", "episode", 0.0, 1.5),
        ("generate", "turn", 0.0, 1.0),
        ("tool", "turn", 1.0, 1.5),
        ("tool", "turn", 1.0, 1.25),
        ("turn", "episode", 1.5, 2.0),
        ("generate", "turn", 1.5, 2.0),
        ("reward", "episode", 2.0, 2.125),
        ("episode", None, 0.0, 2.25),
    ]
    assert len({span.context.trace_id for span in made}) == 1
    assert dict(made[1].attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "turnwise",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 30,
        "gen_ai.response.finish_reasons": ("length",),
        "turnwise.replica": 2,
        "turnwise.key": "k",
        "turnwise.uid": "t/0",
        "turnwise.worker": "worker 1",
    }
    assert made[2].attributes["gen_ai.tool.name"] == "calc"
    assert "error.type" not in made[2].attributes
    assert made[3].attributes["error.type"] == "tool_error"
    assert made[-1].attributes["gen_ai.agent.name"] == "a"
    assert made[-1].attributes["turnwise.reward"] == 0.5
    assert (made[-1].attributes["turnwise.sample_index"], made[-1].attributes["turnwise.rollout_n"]) == (0, 0)
    assert made[-1].status.is_unset
    assert {span.attributes["turnwise.key"] for span in made} == {"k"}


def test_failures_are_errors(spans, exporter):
    """A failed episode names the owner of the fault; an episode that never ended is an error too."""
    start(spans)
    fault = Fault(owner="tool", kind="Broken", message="it broke")
    spans.on_episode_finished(EpisodeResult(task=TASK, global_step=3, status=Status.FAILED, fault=fault))
    start(spans)
    spans.close()
    failed, unfinished = exporter.get_finished_spans()

    assert (failed.status.status_code.name, failed.status.description) == ("ERROR", "it broke")
    assert failed.attributes["turnwise.fault.owner"] == "tool"
    assert unfinished.attributes["turnwise.status"] == "unfinished"
    assert not unfinished.status.is_ok


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_environment_enables_spans(monkeypatch, environment, wanted):
    """An endpoint enables spans, and the standard variables disable them."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_enabled() is wanted


def test_a_missing_package_is_a_warning(monkeypatch):
    """The endpoint may be meant for other programs: the run continues, and a warning has the pip command."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http", None)
    with capture_logs() as logs:
        assert is_enabled() is False
    assert logs[0]["install"] == "pip install 'turnwise-observability[otel]'"


def test_an_endpoint_is_needed():
    """An observer that the config names raises an error without an endpoint, and for one that is no URL."""
    with pytest.raises(ConfigError, match="observer otel: no endpoint"):
        OtelObserver(OtelConfig()).open()
    with pytest.raises(ValueError, match="must start with http"):
        OtelConfig(endpoint="localhost:4317")
