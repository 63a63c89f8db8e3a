"""Metrics from events, and access to the endpoint; `tests/test_observed_runs.py` tests whole runs."""

import http.client
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from turnwise.errors import ConfigError
from turnwise.events.observer import (
    ActorRestarted,
    EpisodesRetried,
    EpisodeStarted,
    LimitReached,
    MemorySwitched,
    Observer,
    RequestRouted,
    RewardFinished,
    RunStarted,
    RunWaiting,
    ToolFinished,
    TurnFinished,
    WeightsUpdated,
)
from turnwise.protocols import Resources
from turnwise.record.result import EpisodeResult
from turnwise.types import EpisodeMetrics, Fault, FinishReason, Status, Task, TrajectoryScore
from turnwise_observability.config import PrometheusConfig
from turnwise_observability.metrics import METRICS, MetricsObserver, TokenRate
from turnwise_observability.metrics_endpoint import make_prometheus

TASK = Task(messages=({"role": "user", "content": "x"},), uid="t")
TURN = TurnFinished(
    uid="t/0",
    num_context_tokens=50,
    num_new_tokens=20,
    num_cached_tokens=30,
    finish_reason=FinishReason.STOP,
    seconds=0.5,
    replica=2,
)


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def observer(registry):
    return MetricsObserver(registry)


def result(**fields):
    metrics = EpisodeMetrics(
        total_s=2.0,
        llm_s=1.5,
        tool_s=0.5,
        num_turns=3,
        num_tokens={"action": 7, "prompt": 4},
        mask_ratio=0.7,
        extra={"max_parallel_calls_hit": 2.0, "tool_output_tokens": 30.0, "programs_passed": 3.0},
    )
    fields.setdefault("status", Status.COMPLETED)
    return EpisodeResult(task=TASK, metrics=metrics, **fields)


def test_every_event_moves_its_metrics(registry, observer):
    """Each event updates its metrics."""
    observer.on_run_started(RunStarted(num_episodes=5, global_step=0, validation=False))
    observer.on_run_waiting(RunWaiting(seconds=12.5))
    observer.on_episode_started(EpisodeStarted(uid="t/0", task=TASK, agent_name="a"))
    observer.on_turn_finished(TURN)
    observer.on_reward_finished(RewardFinished(uid="t/0", reward=1.0, seconds=0.1))
    observer.on_request_routed(RequestRouted(trajectory_id="k", replica=2, kind="migrated", reason="overloaded"))
    observer.on_limit_reached(LimitReached(limit="rollout.max_in_flight", count=3))
    observer.on_actor_restarted(ActorRestarted(kind="worker", index=0, reason="r", restarts=1))
    observer.on_episodes_retried(EpisodesRetried(count=4, worker="worker 0", reason="r"))
    observer.on_weights_updated(WeightsUpdated(version=9, seconds=0.25, replica=1))
    observer.on_memory_switched(
        MemorySwitched(stage="sleep", seconds=0.75, bytes_before=100, bytes_after=10, replica=1)
    )

    expected = {
        ("episodes_requested_total",): 5,
        ("quiet_seconds",): 12.5,
        ("episodes_in_flight",): 1,
        ("turns_total", "replica", "2"): 1,
        ("sampled_tokens_total", "replica", "2"): 20,
        ("context_tokens_total", "replica", "2"): 50,
        ("cached_tokens_total", "replica", "2"): 30,
        ("generate_seconds_sum", "replica", "2"): 0.5,
        ("reward_seconds_sum",): 0.1,
        ("routed_requests_total", "kind", "migrated", "reason", "overloaded"): 1,
        ("limit_reached_total", "limit", "rollout.max_in_flight"): 3,
        ("restarts_total", "kind", "worker"): 1,
        ("episode_retries_total",): 4,
        ("weight_sync_seconds_sum", "replica", "1"): 0.25,
        ("weight_version", "replica", "1"): 9,
        ("memory_switch_seconds_sum", "stage", "sleep"): 0.75,
        ("memory_before_bytes", "stage", "sleep", "replica", "1"): 100,
        ("memory_after_bytes", "stage", "sleep", "replica", "1"): 10,
    }
    found = {
        key: registry.get_sample_value(f"turnwise_{key[0]}", dict(zip(key[1::2], key[2::2], strict=True)))
        for key in expected
    }
    assert found == expected
    assert registry.get_sample_value("turnwise_sampled_tokens_per_second") > 0


def test_an_episode_that_ended(registry, observer):
    """Status, owner of the fault, times, tokens, reward and rejected calls are counted; it is no longer in flight."""
    observer.on_episode_started(EpisodeStarted(uid="t/0", task=TASK, agent_name="a", key="1"))
    observer.on_episode_started(EpisodeStarted(uid="t/0", task=TASK, agent_name="a", key="2"))
    assert registry.get_sample_value("turnwise_episodes_in_flight") == 1
    observer.on_episode_finished(result(scores=(TrajectoryScore(value=0.5),)))
    fault = Fault(owner="tool", kind="K", message="m")
    observer.on_episode_finished(result(status=Status.FAILED, fault=fault))

    def value(name, **labels):
        return registry.get_sample_value(f"turnwise_{name}", labels)

    assert value("episodes_in_flight") == 0
    assert value("episodes_total", status="completed", fault_owner="none") == 1
    assert value("episodes_total", status="failed", fault_owner="tool") == 1
    assert value("tokens_total", origin="action") == 14
    assert value("episode_reward_count") == 1
    assert value("episode_llm_seconds_sum") == 3.0
    assert value("episode_mask_ratio_bucket", le="0.7") == 2
    assert value("limit_reached_total", limit="max_parallel_calls") == 4
    assert value("episode_tool_output_tokens_sum") == 60
    assert value("programs_passed_total") == 6


def test_the_names_of_tool_labels_are_bounded(registry, observer):
    """Names that never worked share one label, and so do names beyond the limit."""

    def call(tool, error):
        observer.on_tool_finished(ToolFinished(uid="t/0", tool=tool, seconds=0.1, error=error, num_characters=10))

    call("made up", True)
    call("search", False)
    call("search", True)
    for number in range(100):
        call(f"tool{number}", False)

    def calls(tool, error):
        return registry.get_sample_value("turnwise_tool_calls_total", {"tool": tool, "error": error})

    assert (calls("made up", "true"), calls("search", "false"), calls("search", "true")) == (None, 1, 1)
    assert calls("other", "true") == 1
    assert calls("other", "false") == 100 - 63
    assert registry.get_sample_value("turnwise_tool_output_characters_bucket", {"tool": "search", "le": "16.0"}) == 2


def test_every_event_has_a_metric():
    """The observer handles all events, and every metric has a unique name, a fitting kind and a help sentence."""
    events = {name for name in vars(Observer) if name.startswith("on_")}
    assert events == {name for name in vars(MetricsObserver) if name.startswith("on_")}
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("turnwise_")
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == "counter")


def test_token_rate():
    """The rate is tokens over the length of the window; older tokens do not count, and a burst is no rate."""
    now = [0.0]
    rate = TokenRate(window_s=10.0, clock=lambda: now[0])
    assert rate.per_second() == 0.0
    rate.add(100)
    assert rate.per_second() == 100.0
    now[0] = 5.0
    rate.add(100)
    assert rate.per_second() == 40.0
    now[0] = 12.0
    assert rate.per_second() == pytest.approx(100 / 7)


# The endpoint


def get(url, token=None):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return {family.name for family in text_string_to_metric_families(answer.read().decode())}


def test_endpoint_serves_between_open_and_close():
    """All metrics are served from the start; after `close` the port is free, and `open` works again."""
    observer = make_prometheus(PrometheusConfig(port=0), Resources())
    assert observer.url == ""
    for _ in range(2):
        observer.open()
        observer.open()
        names = get(observer.url)
        port = int(observer.url.split(":")[2].split("/")[0])
        observer.close()
        observer.close()
        assert {metric.name.removesuffix("_total") for metric in METRICS} <= names
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_in_use():
    """The error names host and port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            make_prometheus(PrometheusConfig(port=port), Resources()).open()


def test_other_machines_need_a_token(monkeypatch):
    """A public address needs a token, and a scrape with a wrong token gets status 401 and no metrics."""
    monkeypatch.delenv("TURNWISE_PROMETHEUS_TOKEN", raising=False)
    config = PrometheusConfig(port=0, host="0.0.0.0")
    with pytest.raises(ConfigError, match="set a token in the environment variable TURNWISE_PROMETHEUS_TOKEN"):
        make_prometheus(config, Resources()).open()
    monkeypatch.setenv("TURNWISE_PROMETHEUS_TOKEN", "secret")
    observer = make_prometheus(config, Resources())
    observer.open()
    try:
        url = observer.url.replace("0.0.0.0", "127.0.0.1")
        for wrong in ("", "Bearer other", "secret", "Bearer s\xe9cret"):
            connection = http.client.HTTPConnection(url.split("/")[2], timeout=600)
            connection.request("GET", "/metrics", headers={"Authorization": wrong.encode("latin-1")})
            answer = connection.getresponse()
            assert (answer.status, b"turnwise_" in answer.read()) == (401, False)
            connection.close()
        assert "turnwise_turns" in get(url, "secret")
    finally:
        observer.close()


@pytest.mark.parametrize(
    ("host", "open_to_all"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("node7", True)]
)
def test_loopback_addresses(monkeypatch, host, open_to_all):
    """Loopback addresses of IPv4 and IPv6 need no token; any other host name does."""
    monkeypatch.delenv("TURNWISE_PROMETHEUS_TOKEN", raising=False)
    observer = make_prometheus(PrometheusConfig(port=0, host=host), Resources())
    try:
        observer.open()
        refused = False
    except ConfigError as error:
        refused = "token" in str(error)
    finally:
        observer.close()
    assert refused == open_to_all
