"""Metrics: how each follows from events, and who may scrape them; whole runs are in `tests/test_observed_runs.py`."""

import http.client
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from turnwise.errors import ConfigError
from turnwise.metrics import METRICS, Meters, TokenRate
from turnwise.metrics_endpoint import PrometheusConfig, prometheus
from turnwise.observer import (
    ActorRestarted,
    EpisodesRetried,
    EpisodeStarted,
    LimitReached,
    MemorySwitched,
    Observer,
    RequestRouted,
    RewardFinished,
    RunStarted,
    ToolFinished,
    TurnFinished,
    WeightsUpdated,
)
from turnwise.result import EpisodeResult
from turnwise.types import EpisodeMetrics, Fault, FinishReason, Status, Task, TrajectoryScore

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
def meters(registry):
    return Meters(registry)


def result(**fields):
    metrics = EpisodeMetrics(
        total_s=2.0,
        llm_s=1.5,
        tool_s=0.5,
        num_turns=3,
        num_tokens={"action": 7, "prompt": 4},
        mask_ratio=0.7,
        extra={"max_parallel_calls_hit": 2.0},
    )
    fields.setdefault("status", Status.COMPLETED)
    return EpisodeResult(task=TASK, metrics=metrics, **fields)


def test_every_event_moves_its_metrics(registry, meters):
    """
    What each event says is in the metrics that it belongs to.
    """
    meters.on_run_started(RunStarted(num_episodes=5, global_step=0, validation=False))
    meters.on_episode_started(EpisodeStarted(uid="t/0", task=TASK, agent_name="a"))
    meters.on_turn_finished(TURN)
    meters.on_reward_finished(RewardFinished(uid="t/0", reward=1.0, seconds=0.1))
    meters.on_request_routed(RequestRouted(trajectory_id="k", replica=2, kind="moved", reason="overloaded"))
    meters.on_limit_reached(LimitReached(limit="rollout.max_in_flight", count=3))
    meters.on_actor_restarted(ActorRestarted(kind="worker", index=0, reason="r", restarts=1))
    meters.on_episodes_retried(EpisodesRetried(count=4, worker="worker 0", reason="r"))
    meters.on_weights_updated(WeightsUpdated(version=9, seconds=0.25, replica=1))
    meters.on_memory_switched(MemorySwitched(stage="sleep", seconds=0.75, bytes_before=100, bytes_after=10, replica=1))

    expected = {
        ("episodes_asked_total",): 5,
        ("episodes_in_flight",): 1,
        ("turns_total", "replica", "2"): 1,
        ("sampled_tokens_total", "replica", "2"): 20,
        ("context_tokens_total", "replica", "2"): 50,
        ("cached_tokens_total", "replica", "2"): 30,
        ("generate_seconds_sum", "replica", "2"): 0.5,
        ("reward_seconds_sum",): 0.1,
        ("routed_requests_total", "kind", "moved", "reason", "overloaded"): 1,
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


def test_an_episode_that_ended(registry, meters):
    """
    Its status, whose fault it was, its times, tokens, reward and refused calls are counted, and it is not in flight.
    """
    meters.on_episode_started(EpisodeStarted(uid="t/0", task=TASK, agent_name="a", key="1"))
    meters.on_episode_started(EpisodeStarted(uid="t/0", task=TASK, agent_name="a", key="2"))
    assert registry.get_sample_value("turnwise_episodes_in_flight") == 1
    meters.on_episode_finished(result(scores=(TrajectoryScore(value=0.5),)))
    fault = Fault(owner="tool", kind="K", message="m")
    meters.on_episode_finished(result(status=Status.FAILED, fault=fault))

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


def test_what_a_model_calls_is_no_label(registry, meters):
    """
    Names that never worked share one label, and there are never more labels than a scrape can bear.
    """

    def call(tool, error):
        meters.on_tool_finished(ToolFinished(uid="t/0", tool=tool, seconds=0.1, error=error, num_characters=10))

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


def test_every_event_is_heard():
    """
    No event is without a metric, and every metric has its name, kind and a sentence.
    """
    events = {name for name in vars(Observer) if name.startswith("on_")}
    assert events == {name for name in vars(Meters) if name.startswith("on_")}
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("turnwise_")
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == "counter")


def test_token_rate():
    """
    Tokens of the window over its length; what is older does not count, and a burst is not taken for a rate.
    """
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
    with urllib.request.urlopen(request, timeout=10) as answer:
        return {family.name for family in text_string_to_metric_families(answer.read().decode())}


def test_endpoint_serves_between_open_and_close():
    """
    Every metric is there from the beginning; after the end the port is free, and it can be opened again.
    """
    observer = prometheus(PrometheusConfig(port=0))
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


def test_a_taken_port_is_said_plainly():
    """
    One line with host and port.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            prometheus(PrometheusConfig(port=port)).open()


def test_others_need_a_token(monkeypatch):
    """
    An address that others reach is refused without a token, and with one whoever shows another gets nothing.
    """
    monkeypatch.delenv("TURNWISE_PROMETHEUS_TOKEN", raising=False)
    config = PrometheusConfig(port=0, host="0.0.0.0")
    with pytest.raises(ConfigError, match="set a token in the environment variable TURNWISE_PROMETHEUS_TOKEN"):
        prometheus(config).open()
    monkeypatch.setenv("TURNWISE_PROMETHEUS_TOKEN", "secret")
    observer = prometheus(config)
    observer.open()
    try:
        url = observer.url.replace("0.0.0.0", "127.0.0.1")
        for wrong in ("", "Bearer other", "secret", "Bearer s\xe9cret"):
            connection = http.client.HTTPConnection(url.split("/")[2], timeout=10)
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
def test_what_counts_as_this_machine(monkeypatch, host, open_to_all):
    """
    Loopback addresses of both kinds need no token; a name that could be anything does.
    """
    monkeypatch.delenv("TURNWISE_PROMETHEUS_TOKEN", raising=False)
    observer = prometheus(PrometheusConfig(port=0, host=host))
    try:
        observer.open()
        refused = False
    except ConfigError as error:
        refused = "token" in str(error)
    finally:
        observer.close()
    assert refused == open_to_all
