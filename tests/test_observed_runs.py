"""Whole runs, in one process and on Ray, observed by the trace file, the metrics endpoint and OTLP spans."""

import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import structlog
from observed_blueprint import (
    NUM_TURNS,
    STREAMS,
    LoggingBlueprint,
    ObservedBlueprint,
    local_manager,
    log_to,
    ray_manager,
)
from prometheus_client.parser import text_string_to_metric_families
from ray_runs import ON_RAY, make_tasks, pids, wait_until
from structlog.testing import capture_logs

from turnwise import Resources
from turnwise.batch.packed_batch import collate_packed
from turnwise_observability.config import OtelConfig, PrometheusConfig
from turnwise_observability.episode_log import EpisodeLog
from turnwise_observability.metrics_endpoint import make_prometheus
from turnwise_observability.otel import OtelObserver
from turnwise_observability.routing_log import RoutingLog
from turnwise_observability.trace_file import TraceFile
from turnwise_result_files import TrajectoryWriter
from turnwise_result_files.summary import summarize

NUM_EPISODES = 24


def everywhere(*marks):
    """Run a test with a manager of this process, and with one on Ray that has these marks."""
    on_ray = pytest.param("ray", id="ray", marks=[*ON_RAY, *marks])
    return pytest.mark.parametrize("manager", [pytest.param("local", id="local"), on_ray], indirect=True)


@pytest.fixture
def manager(request):
    """A function that builds a manager with observers, in this process or on Ray."""
    if request.param == "local":
        return local_manager
    request.getfixturevalue("ray_cluster")
    return ray_manager


# Log lines


@everywhere(pytest.mark.slow)
def test_log_lines_of_an_episode_share_its_key(manager):
    """The driver writes a line for every episode and every decision of a router, and one key joins them."""
    with capture_logs() as lines, manager(EpisodeLog(), RoutingLog()) as running:
        results = running.rollout(make_tasks(NUM_EPISODES))

    finished = {line["key"]: line for line in lines if line["event"] == "episode finished"}
    assert {result.key: result.uid for result in results} == {key: line["episode"] for key, line in finished.items()}
    assert {result.worker for result in results} == {line["worker"] for line in finished.values()}
    routed = Counter(line["key"] for line in lines if line["event"] == "request routed")
    # One engine in this process has no router.
    assert routed in (Counter(), Counter({result.key: NUM_TURNS for result in results}))
    assert bool(routed) == (type(running.runtime).__name__ == "RayRuntime")


@pytest.fixture
def _closed_streams():
    yield
    structlog.reset_defaults()  # before the streams are closed
    while STREAMS:
        STREAMS.pop().close()


@everywhere(pytest.mark.slow)
@pytest.mark.usefixtures("_closed_streams")
def test_one_grep_follows_a_trajectory(manager, tmp_path):
    """One key is in the logs of all processes, in the file of episodes, in the trace file and on every span."""
    receiver, on_ray = Receiver(), manager is ray_manager
    observers = [EpisodeLog(), RoutingLog(), TraceFile(tmp_path / "trace.json")]
    observers.append(OtelObserver(OtelConfig(endpoint=receiver.url)))
    blueprint, options = LoggingBlueprint(0.001, logs=str(tmp_path)), {"reward_workers": 1} if on_ray else {}
    log_to(tmp_path)
    try:
        with manager(*observers, blueprint=blueprint, **options) as running:
            results = running.rollout(make_tasks(4))
    finally:
        receiver.close()
    with TrajectoryWriter(tmp_path / "episodes.parquet") as writer:
        for result in results:
            writer.write(result)
    one = results[0]
    (tmp_path / "spans.jsonl").write_text("\n".join(map(flat, receiver.spans)))

    found = grep(one.key, tmp_path)

    lines = [json.loads(line) for path, line in found if path.suffix == ".log"]
    written = Counter(line["event"] for line in lines if line["event"] != "request routed")
    num_tools = 2 * NUM_TURNS - 2
    expected = {"engine called": NUM_TURNS, "tool called": num_tools, "reward called": 1, "episode finished": 1}
    assert written == expected
    processes = {path.name for path, _line in found if path.suffix == ".log"}
    # The driver, a worker, a replica and the reward worker; an episode may also move to the other replica.
    assert len(processes) - (len(one.metrics.replicas) - 1) == (4 if on_ray else 1)
    assert {line["episode"] for line in lines if line["event"] in {"tool called", "reward called"}} == {one.uid}
    spans = Counter(json.loads(line)["name"] for path, line in found if path.suffix == ".jsonl")
    assert spans == {"episode": 1, "turn": NUM_TURNS, "generate": NUM_TURNS, "tool": num_tools, "reward": 1}
    slices = [json.loads(line.rstrip(",")) for path, line in found if path.name == "trace.json"]
    assert Counter(each["cat"] for each in slices) == spans
    assert {each["args"]["worker"] for each in slices} == {one.worker}
    assert {each["args"]["replica"] for each in slices if each["cat"] == "generate"} == {*one.metrics.replicas}
    rows = pq.read_table(
        tmp_path / "episodes.parquet", columns=["key", "uid", "rollout_n", "worker", "replicas"]
    ).to_pylist()
    names = {"key": one.key, "uid": one.task.uid, "rollout_n": one.rollout_n, "worker": one.worker}
    wanted = names | {"replicas": [*one.metrics.replicas]}
    assert [row for row in rows if row["key"] == one.key] == [wanted]


@everywhere(pytest.mark.slow)
def test_recorded_numbers_are_in_log_summary_and_batch(manager):
    """A number that an agent records is in the line and the rows of its episode, and the summary has sum and mean."""
    with capture_logs() as lines, manager(EpisodeLog()) as running:
        results = running.rollout(make_tasks(4))

    per_episode = float(2 * (NUM_TURNS - 1))
    logged = [line["extra"] for line in lines if line["event"] == "episode finished"]
    assert logged == [row.metrics for row in collate_packed(results, pad_token_id=0).rows]
    assert logged == [{"tool_output_tokens": per_episode}] * 4
    found = summarize(results, 1.0)["extra"]
    assert found == {"tool_output_tokens": {"sum": 4 * per_episode, "mean": per_episode}}


def grep(text, folder):
    """Return each line with a text in the files of a folder, and its file, as the program `grep` finds them."""
    found = subprocess.run(
        ["grep", "-r", "-I", "--null", text, str(folder)], check=True, capture_output=True, text=True
    )
    pairs = [line.split("\0", 1) for line in found.stdout.splitlines()]
    return [(Path(path), line) for path, line in pairs]


def flat(span):
    """Return a span that a receiver got as a line of JSON."""
    return json.dumps({"name": span.name, **attributes_of(span)})


def attributes_of(span):
    """Return the attributes of a span that a receiver got, as plain values."""
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [each.int_value for each in value.values] if kind == "array_value" else value
    return found


# The trace file


def slices_of(path):
    """Return the slices of a trace by (pid, tid), sorted, outer ones first, and the names of the pids."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        lane.sort(key=lambda event: (event["ts"], -event["dur"]))
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert {pid for pid, _tid in lanes} <= set(names)
    return lanes, names, events


def assert_nested(lanes):
    """In each slot, a slice ends before the next starts, or contains it."""
    for lane in lanes.values():
        ends = []
        for event in lane:
            while ends and ends[-1] <= event["ts"] + 0.0015:  # times are rounded to nanoseconds
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 0.0015, event
            ends.append(end)


@everywhere(pytest.mark.slow)
def test_trace_of_a_run(manager, tmp_path):
    """Each turn, tool call and reward of the results is one slice in the row of its worker or replica; slices nest."""
    path = tmp_path / "deep" / "run.json"
    before = time.time()
    with manager(TraceFile(path)) as running:
        results = running.rollout(make_tasks(NUM_EPISODES), global_step=3)
    lanes, names, events = slices_of(path)

    assert_nested(lanes)
    by_category = Counter((e["cat"], e["args"]["uid"]) for lane in lanes.values() for e in lane)
    assert by_category == Counter(
        {
            (category, result.uid): count
            for result in results
            for category, count in (
                ("episode", 1),
                ("turn", NUM_TURNS),
                ("generate", NUM_TURNS),
                ("tool", 2 * NUM_TURNS - 2),
                ("reward", 1),
            )
        }
    )
    kinds = {(names[pid].split()[0], e["cat"]) for (pid, _tid), lane in lanes.items() for e in lane}
    assert kinds == {
        ("replica", "generate"), ("worker", "episode"), ("worker", "turn"), ("worker", "tool"), ("worker", "reward"),
    }  # fmt: skip
    generated = [e for lane in lanes.values() for e in lane if e["cat"] == "generate"]
    assert sum(e["args"]["new_tokens"] for e in generated) == sum(r.metrics.num_tokens["action"] for r in results)
    assert all(0 <= e["ts"] <= 1e6 * (time.time() - before) for e in generated)
    arrows = Counter((e["ph"], e["id"]) for e in events if e["ph"] in "sf")
    assert len(arrows) == 2 * len(generated)


@everywhere(pytest.mark.slow)
def test_turns_of_an_episode_follow_each_other(manager, tmp_path):
    """Times of all processes are on one clock: a turn of an episode starts after the end of the previous one."""
    with manager(TraceFile(tmp_path / "run.json")) as running:
        running.rollout(make_tasks(NUM_EPISODES))
    lanes, _names, _events = slices_of(tmp_path / "run.json")
    episodes = {e["args"]["uid"]: e for lane in lanes.values() for e in lane if e["cat"] == "episode"}
    turns = defaultdict(list)
    for lane in lanes.values():
        for event in lane:
            if event["cat"] == "generate":
                turns[event["args"]["uid"]].append(event)

    for uid, generated in turns.items():
        generated.sort(key=lambda event: event["ts"])
        for one, other in pairwise(generated):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.0015
        assert episodes[uid]["ts"] <= generated[0]["ts"] + 0.0015
        assert generated[-1]["ts"] + generated[-1]["dur"] <= episodes[uid]["ts"] + episodes[uid]["dur"] + 0.0015


@everywhere(pytest.mark.slow)
def test_trace_of_an_interrupted_run(manager, tmp_path):
    """The file can be read during the run, and after an abort it has the aborted episodes."""
    path = tmp_path / "run.json"
    with manager(TraceFile(path), blueprint=ObservedBlueprint(0.02, max_in_flight=4)) as running:
        finished = running.iterate(make_tasks(NUM_EPISODES))
        next(finished)
        json.loads(path.read_text())
        running.abort()
        results = list(finished)
    lanes, _names, _events = slices_of(path)

    assert len(results) == NUM_EPISODES - 1
    assert_nested(lanes)
    statuses = Counter(e["args"]["status"] for lane in lanes.values() for e in lane if e["cat"] == "episode")
    assert statuses["completed"] + statuses["truncated"] >= 1
    assert statuses["aborted"] >= 1


# The metrics endpoint


def scrape(url, token=None):
    """Return the samples at an endpoint: value by name and labels."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=600) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def total(samples, name, **labels):
    """Return the sum of a metric's samples that have these labels."""
    return sum(value for (found, has), value in samples.items() if found == name and set(labels.items()) <= set(has))


@everywhere(pytest.mark.slow)
def test_endpoint_during_and_after_a_run(manager):
    """One endpoint has the numbers of all processes during the run, and at the end they match the results."""
    observer = make_prometheus(PrometheusConfig(port=0), Resources())
    with manager(observer, blueprint=ObservedBlueprint(0.004, max_in_flight=4)) as running:
        finished = running.iterate(make_tasks(NUM_EPISODES))
        first = next(finished)
        during = scrape(observer.url)
        results = [first, *finished]
        url = observer.url
        after = scrape(url)
    with pytest.raises(urllib.error.URLError):
        scrape(url)

    assert total(during, "turnwise_episodes_requested_total") == NUM_EPISODES
    # On a slow machine all of them may have ended before the page was read.
    assert 1 <= total(during, "turnwise_episodes_total") <= NUM_EPISODES
    assert total(during, "turnwise_turns_total") >= NUM_TURNS
    assert total(after, "turnwise_episodes_total", fault_owner="none") == NUM_EPISODES
    assert total(after, "turnwise_episodes_in_flight") == 0
    assert total(after, "turnwise_turns_total") == NUM_EPISODES * NUM_TURNS
    for origin in ("prompt", "action", "observation"):
        expected = sum(r.metrics.num_tokens[origin] for r in results)
        assert total(after, "turnwise_tokens_total", origin=origin) == expected
    assert total(after, "turnwise_sampled_tokens_total") == total(after, "turnwise_tokens_total", origin="action")
    assert total(after, "turnwise_sampled_tokens_per_second") > 0
    calls = NUM_EPISODES * (2 * NUM_TURNS - 2)
    assert total(after, "turnwise_tool_calls_total", tool="wait", error="false") == calls
    assert total(after, "turnwise_tool_output_characters_sum") == sum(
        len(r.task.uid) * (2 * NUM_TURNS - 2) for r in results
    )
    assert total(after, "turnwise_episode_reward_sum") == NUM_EPISODES / 2
    assert total(after, "turnwise_reward_seconds_count") == NUM_EPISODES
    assert total(after, "turnwise_episode_mask_ratio_count") == NUM_EPISODES
    assert total(after, "turnwise_limit_reached_total", limit="rollout.max_in_flight") > 0


@pytest.mark.ray
@pytest.mark.slow
def test_endpoint_shows_routing_and_faults(ray_cluster):
    """On Ray: first, sticky and moved requests, full replicas and restarts are counted."""
    observer = make_prometheus(PrometheusConfig(port=0), Resources())
    with ray_manager(observer, blueprint=ObservedBlueprint(0.01), max_in_flight=2) as running:
        finished = running.iterate(make_tasks(NUM_EPISODES))
        next(finished)
        os.kill(pids(running.runtime.policy.slots)[0], signal.SIGKILL)
        results = list(finished)
        wait_until(
            lambda: total(scrape(observer.url), "turnwise_restarts_total", kind="replica") >= 1,
            "no restart was counted",
        )
        samples, moved = scrape(observer.url), running.stats()["migrations"]

    assert len(results) == NUM_EPISODES - 1
    assert moved >= 1
    assert total(samples, "turnwise_routed_requests_total", kind="first") == NUM_EPISODES
    assert total(samples, "turnwise_routed_requests_total", kind="sticky") > NUM_EPISODES
    assert total(samples, "turnwise_routed_requests_total", kind="migrated") >= 1
    assert total(samples, "turnwise_limit_reached_total", limit="runtime.ray.max_in_flight") > 0


# Spans


class Receiver:
    """A real OTLP receiver over HTTP that keeps the spans it receives."""

    def __init__(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans, services = [], set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(body)
                assert self.path == "/v1/traces"
                for resource in request.resource_spans:
                    services.update(
                        a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
                    )
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_args):
                pass

        self.spans, self.services = spans, services
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@everywhere(pytest.mark.slow)
def test_spans_reach_an_otlp_receiver(manager):
    """Over real HTTP: a tree per episode, whose turns contain generate and tool calls; each span lies in its parent."""
    receiver = Receiver()
    try:
        with manager(OtelObserver(OtelConfig(endpoint=receiver.url, service_name="tried"), "tiny")) as running:
            results = running.rollout(make_tasks(NUM_EPISODES))
    finally:
        receiver.close()
    spans = {span.span_id: span for span in receiver.spans}

    def parent_name(span):
        return spans[span.parent_span_id].name if span.parent_span_id else None

    assert receiver.services == {"tried"}
    assert Counter((span.name, parent_name(span)) for span in spans.values()) == {
        ("episode", None): len(results),
        ("turn", "episode"): len(results) * NUM_TURNS,
        ("generate", "turn"): len(results) * NUM_TURNS,
        ("tool", "turn"): len(results) * (2 * NUM_TURNS - 2),
        ("reward", "episode"): len(results),
    }
    for span in spans.values():
        if span.parent_span_id:
            parent = spans[span.parent_span_id]
            assert span.trace_id == parent.trace_id
            assert parent.start_time_unix_nano <= span.start_time_unix_nano + 1000
            assert span.end_time_unix_nano <= parent.end_time_unix_nano + 1000
    attributes = [attributes_of(span) for span in spans.values() if span.name == "generate"]
    sampled = sum(values["gen_ai.usage.output_tokens"] for values in attributes)
    assert sampled == sum(r.metrics.num_tokens["action"] for r in results)
    assert {values["gen_ai.request.model"] for values in attributes} == {"tiny"}
    named = Counter(tuple(attributes_of(span)[f"turnwise.{name}"] for name in NAMES) for span in spans.values())
    num_spans = 2 + 2 * NUM_TURNS + 2 * NUM_TURNS - 2
    assert named == {(result.key, result.uid, result.worker): num_spans for result in results}
    episodes = [attributes_of(span) for span in spans.values() if span.name == "episode"]
    numbers = {each["turnwise.key"]: [each[f"turnwise.{name}"] for name in NUMBERS] for each in episodes}
    wanted = {r.key: [r.task.sample_index, r.rollout_n, [*r.metrics.replicas]] for r in results}
    assert numbers == wanted
    assert not any(name.endswith((".messages", ".result", ".arguments")) for each in episodes for name in each)


NAMES, NUMBERS = ("key", "uid", "worker"), ("sample_index", "rollout_n", "replicas")


@everywhere(pytest.mark.slow)
def test_texts_reach_an_otlp_receiver(manager):
    """With the option, prompts, answers and the texts of tools of each episode are on its spans."""
    receiver = Receiver()
    try:
        with manager(OtelObserver(OtelConfig(endpoint=receiver.url, texts=True))) as running:
            results = running.rollout(make_tasks(4))
    finally:
        receiver.close()
    one = results[0]
    spans = [(span.name, attributes_of(span)) for span in receiver.spans]
    own = [(name, values) for name, values in spans if values["turnwise.key"] == one.key]

    def texts(name, attribute):
        return [json.loads(values[attribute]) for found, values in own if found == name]

    (given,) = texts("episode", "gen_ai.input.messages")
    assert given == [{"role": "user", "parts": [{"type": "text", "content": "x"}]}]
    answers = [messages[0]["parts"][0]["content"] for messages in texts("generate", "gen_ai.output.messages")]
    assert sorted(answers) == [f"answer {number} of {one.task.uid}" for number in range(1, NUM_TURNS + 1)]
    called = texts("tool", "gen_ai.tool.call.arguments")
    assert called == [{"what": one.task.uid}] * (2 * NUM_TURNS - 2)
    results_of_tools = [values["gen_ai.tool.call.result"] for name, values in own if name == "tool"]
    assert results_of_tools == [one.task.uid] * (2 * NUM_TURNS - 2)
