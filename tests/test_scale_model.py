"""The scale model: conservation, queueing laws, repairs, and the script `benchmarks/scale_limits.py`."""

import json
import math
import sys
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise_routing_bench.simulator import ReplicaModel
from turnwise_routing_bench.traces import TraceTrajectory, TraceTurn

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from scale_limits import KINDS, choose_fold, main, parse_arguments, predict  # needs the path
from scale_model.costs import Costs, fields_of_costs, load_costs
from scale_model.parts import Queue, Station
from scale_model.result import FixedCosts, simulate
from scale_model.run import Death, Run
from scale_model.simulation import Simulation

FREE = Costs(**dict.fromkeys(fields_of_costs(), 0.0))
"""Costs of nothing, so that only engines and tools take time."""
MEASURED = load_costs().costs
BUSY = evolve(MEASURED, driver_wake_s=0.0, worker_wake_s=0.0, replica_wake_s=0.0)
"""Costs of processes that are never idle, so that the cost of a job does not depend on the others."""
SERVER = ReplicaModel(step_s=0.01, request_s=0.0, token_s=0.0, prefill_token_s=0.0, max_in_flight=4)


def episode(*turns, prompt=100):
    """Return a function that makes equal episodes; a turn is (new tokens, tool seconds)."""
    made = tuple(TraceTurn(num_new_tokens=n, tool_s=s, num_observation_tokens=20) for n, s in turns)
    return lambda _rng, number: TraceTrajectory(trajectory_id=str(number), num_prompt_tokens=prompt, turns=made)


def random_episode(rng, number):
    """Return an episode that depends on the random numbers of the run."""
    turns = [(rng.randint(1, 60), rng.choice([0.0, rng.random()])) for _ in range(rng.randint(1, 4))]
    return episode(*turns, prompt=rng.randint(1, 500))(rng, number)


runs = st.builds(
    Run,
    num_workers=st.integers(1, 4),
    num_replicas=st.integers(1, 3),
    make_episode=st.just(random_episode),
    num_episodes=st.integers(1, 60),
    max_in_flight=st.integers(1, 20),
    window=st.integers(1, 30),
    engine=st.sampled_from([0.0, 0.001, SERVER]),
    coalesce_s=st.sampled_from([0.0, 0.02]),
    cores=st.sampled_from([None, 1, 2]),
    others=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)


@st.composite
def runs_with_deaths(draw):
    """A run in which up to five processes die and come back."""
    run = draw(runs)
    one = st.sampled_from([("replica", run.num_replicas), ("worker", run.num_workers)]).flatmap(
        lambda kind: st.builds(
            Death,
            at_s=st.floats(0, 3),
            kind=st.just(kind[0]),
            index=st.integers(0, kind[1] - 1),
            detect_s=st.floats(0, 1),
            restart_s=st.floats(0, 2),
        )
    )
    deaths = draw(st.lists(one, max_size=5, unique_by=lambda death: (death.kind, death.index)))
    return evolve(run, deaths=tuple(deaths))


@given(run=runs_with_deaths(), costs=st.sampled_from([FREE, MEASURED]))
@settings(max_examples=60, deadline=None)
def test_every_episode_ends_exactly_once(run, costs):
    """Each episode is delivered once, whatever dies, and no request, slot or byte is left behind."""
    simulation = Simulation(run, costs)
    simulation.simulate()
    assert simulation.ended == dict.fromkeys(range(run.num_episodes), 1)
    assert simulation.num_started == 0
    assert simulation.backlog_bytes == pytest.approx(0, abs=1e-3)
    for worker in simulation.workers:
        assert not worker.held
        assert not worker.waiting
        assert not any(link.requests or link.pending for link in worker.links.values())


@given(run=runs)
@settings(max_examples=60, deadline=None)
def test_no_part_is_busy_longer_than_the_run(run):
    """Every use is at most 1, and cores are a limit for all processes together."""
    result = simulate(run, evolve(MEASURED, driver_idle=0.0, worker_idle=0.0, replica_idle=0.0))
    for use in (result.driver, result.worker_max, result.replica_max, result.engine):
        assert 0 <= use <= 1 + 1e-9
    if run.cores:
        assert result.driver_s + result.workers_s + result.replicas_s <= run.cores * result.seconds * (1 + 1e-9) + 1e-9


@given(run=runs)
@settings(max_examples=60, deadline=None)
def test_obeys_littles_law(run):
    """Mean episodes in flight are throughput times mean seconds of an episode (Little 1961)."""
    result = simulate(run, MEASURED)
    assert result.mean_in_flight == pytest.approx(result.episodes_per_s * result.mean_episode_s, rel=1e-6)


@given(run=runs)
@settings(max_examples=60, deadline=None)
def test_obeys_the_utilisation_law(run):
    """CPU seconds of each kind of process are the sum of its visits times their cost (Buzen and Denning 1978)."""
    run = evolve(run, heartbeat_s=0.0, cores=None)
    costs = evolve(BUSY, **dict.fromkeys((n for n in fields_of_costs() if n.endswith("byte_s")), 0.0))
    simulation = Simulation(run, costs)
    simulation.simulate()
    totals = simulation.totals
    driver_s = totals["collects"] * costs.call_s + totals["episodes"] * costs.driver_episode_s
    driver_s += totals["tokens"] * costs.driver_token_s + totals["submits"] * costs.post_s
    assert simulation.driver.busy_s == pytest.approx(driver_s)
    replicas_s = totals["to_replica"] * costs.request_receive_s + totals["to_worker"] * costs.result_send_s
    replicas_s += totals["turns"] * costs.replica_request_s
    # The run may end before a replica has read that the last episodes are released.
    spare_s = run.num_workers * run.num_replicas * 2 * costs.request_receive_s
    busy_s = sum(replica.station.busy_s for replica in simulation.replicas)
    assert replicas_s - spare_s - 1e-9 <= busy_s <= replicas_s + 1e-9


@given(turns=st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=1, max_size=4), count=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_is_never_faster_than_one_episode_alone(turns, count):
    """A run takes at least the engine's and the tools' seconds of an episode."""
    run = Run(num_workers=2, num_replicas=2, make_episode=episode(*turns), num_episodes=count, engine=SERVER)
    alone_s = sum(n * SERVER.step_s for n, _tool in turns) + sum(tool for _n, tool in turns[:-1])
    assert simulate(run, MEASURED).seconds >= alone_s - 1e-9


@given(num_replicas=st.integers(1, 4), workers=st.integers(1, 3), count=st.integers(8, 60), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_more_replicas_are_never_slower_where_they_limit(num_replicas, workers, count, seed):
    """Twice the replicas never take longer when nothing else takes time."""
    run = Run(
        num_workers=workers,
        num_replicas=num_replicas,
        make_episode=episode((20, 0.0)),
        num_episodes=count,
        max_in_flight=64,
        engine=SERVER,
        coalesce_s=0.0,
        heartbeat_s=0.0,
        latency_s=0.0,
        network_byte_s=0.0,
        seed=seed,
    )
    few, many = (simulate(evolve(run, num_replicas=n * num_replicas), FREE).seconds for n in (1, 2))
    assert many <= few + 1e-9


def test_a_saturated_driver_caps_the_run():
    """With a slow driver, throughput is one over its cost of an episode, and more replicas change nothing."""
    costs = evolve(FREE, driver_episode_s=0.01)
    run = Run(num_workers=4, num_replicas=4, make_episode=episode((5, 0.0)), num_episodes=400, engine=0.001)
    for num_replicas in (4, 8):
        result = simulate(evolve(run, num_replicas=num_replicas), costs)
        assert result.episodes_per_s == pytest.approx(100, rel=0.05)
        assert result.bottleneck == "driver"


def test_pings_take_a_bounded_share_of_the_driver():
    """They cost a call per actor and heartbeat, and are rarer where there are many actors."""
    costs = evolve(FREE, call_s=0.001)
    run = Run(num_workers=900, num_replicas=100, make_episode=episode((100, 0.0)), num_episodes=1000, engine=0.1)
    result = simulate(evolve(run, heartbeat_s=5.0), costs)
    collects_s = result.messages["collects"] * costs.call_s
    assert result.driver == pytest.approx(0.2 + collects_s / result.seconds, abs=0.01)
    assert FixedCosts.of(run, costs).pings == pytest.approx(0.2)
    assert FixedCosts.of(evolve(run, num_workers=90_000, num_replicas=1000), costs).pings == pytest.approx(0.5)
    assert FixedCosts.of(evolve(run, heartbeat_s=0.0), costs).pings == 0.0


@pytest.mark.slow
def test_many_workers_answer_the_driver_rarely():
    """The driver's calls take half of its time at most, and the end of the run does not wait."""
    run = Run(num_workers=8, num_replicas=8, make_episode=random_episode, num_episodes=4000, engine=0.001)
    few, many = (simulate(evolve(run, num_workers=n, num_replicas=n), FREE) for n in (8, 400))
    for result, workers in ((few, 8), (many, 400)):
        gap_s = max(0.02, 0.002 * workers)
        assert result.messages["collects"] <= workers * (result.seconds / gap_s + 2)


def test_an_idle_process_wakes_up():
    """The first of several jobs takes longer, and so does one that comes after a pause."""
    queue = Queue()
    station = Station(queue, wake_s=1.0)
    for at_s in (0.0, 0.0, 10.0):
        queue.schedule(at_s, lambda: station.add_work(2.0, lambda: None))
    while queue.next_at < math.inf:
        queue.pop()()
    assert (8.0, 2) == (station.busy_s, station.num_wakes)


def test_other_programs_slow_a_run_down():
    """Programs that keep one of two cores busy cost a run time, and none of its CPU seconds."""
    run = Run(num_workers=4, num_replicas=4, make_episode=episode((5, 0.0)), num_episodes=200, engine=0.0, cores=2)
    run, costs = evolve(run, heartbeat_s=0.0), evolve(BUSY, worker_idle=0.0)
    alone, beside = (simulate(evolve(run, others=others), costs) for others in (0.0, 1.0))
    assert beside.seconds > 1.2 * alone.seconds
    assert beside.workers_s == pytest.approx(alone.workers_s, rel=0.2)


def test_messages_coalesce():
    """A gap between messages makes them fewer, and many replicas make them more."""
    run = Run(num_workers=1, num_replicas=1, make_episode=random_episode, num_episodes=200, engine=SERVER)
    number = {
        (gap_s, replicas): simulate(evolve(run, coalesce_s=gap_s, num_replicas=replicas), MEASURED).messages[
            "to_replica"
        ]
        for gap_s in (0.0, 0.02)
        for replicas in (1, 16)
    }
    assert number[0.02, 1] < number[0.0, 1]
    assert number[0.02, 16] > number[0.02, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seconds"), [("short", 20.0), ("agent", 80.0), ("long", 400.0)])
def test_a_share_predicts_the_whole(name, seconds):
    """A quarter of a run, folded, predicts throughput and use of the whole run."""
    run = Run(
        num_workers=16,
        num_replicas=16,
        make_episode=KINDS[name].draw,
        max_in_flight=min(12, KINDS[name].max_running),
        engine=ReplicaModel(max_in_flight=KINDS[name].max_running),
        until_s=seconds,
        warm_up_s=seconds / 4,
        stagger=True,
    )
    whole, share = (simulate(evolve(run, fold=fold), MEASURED) for fold in (1, 4))
    assert share.turns_per_s == pytest.approx(whole.turns_per_s, rel=0.2)
    assert share.turns_per_message == pytest.approx(whole.turns_per_message, rel=0.1)
    assert share.worker == pytest.approx(whole.worker, rel=0.15)
    assert share.driver == pytest.approx(whole.driver, rel=0.3)


def test_requests_of_a_dead_replica_move():
    """Its requests run again elsewhere, after the driver has told the workers."""
    run = Run(num_workers=2, num_replicas=2, make_episode=episode((50, 0.0)), num_episodes=20, engine=0.1)
    death = Death(at_s=1.0, kind="replica", index=0, detect_s=3.0)
    result, calm = (simulate(evolve(run, deaths=deaths), MEASURED) for deaths in ((death,), ()))
    assert 8 <= result.moved <= 12
    assert calm.moved == 0
    assert result.seconds == pytest.approx(calm.seconds + 4.0, abs=0.2)


def test_episodes_of_a_dead_worker_run_again():
    """Other workers run its episodes from their start."""
    run = Run(num_workers=2, num_replicas=2, make_episode=episode((50, 0.0)), num_episodes=20, engine=0.1)
    result = simulate(evolve(run, deaths=(Death(at_s=1.0, kind="worker", index=1),)), MEASURED)
    assert result.retried == 10
    assert result.episodes == 20


def test_is_deterministic():
    """One seed gives one result."""
    run = Run(num_workers=2, num_replicas=2, make_episode=random_episode, num_episodes=40)
    assert simulate(run, MEASURED) == simulate(run, MEASURED)
    assert simulate(run, MEASURED) != simulate(evolve(run, seed=1), MEASURED)


def test_refuses_a_run_that_never_ends():
    """A run without a number of episodes needs an end, and shares must be equal."""
    with pytest.raises(ValueError, match="until_s"):
        Run(num_workers=1, num_replicas=1, make_episode=random_episode)
    with pytest.raises(ValueError, match="multiples of fold, 2; got 3"):
        Run(num_workers=3, num_replicas=2, make_episode=random_episode, num_episodes=2, fold=2)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 400))
def test_shares_are_equal(workers, replicas, in_flight):
    """The number of shares divides workers and replicas."""
    fold = choose_fold(workers, replicas, in_flight)
    assert math.gcd(workers, replicas) % fold == 0


def test_command_prints_json_and_tables(capsys):
    """Both forms hold every size."""
    words = ("--sizes", "2x2,4x2", "--episodes", "short", "--in-flight", "8", "--seconds", "3")
    main([*words, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert [(row["workers"], row["replicas"]) for row in document["results"]] == [(2, 2), (4, 2)]
    assert document["results"][0]["turns_per_s"] > 0
    main(words)
    text = capsys.readouterr().out
    assert "while episodes run" in text
    assert "4x2" in text


def test_cells_share_the_load():
    """Cells multiply the throughput of one of them, and divide the pairs of all."""
    words = ["--episodes", "short", "--seconds", "3", "--warm-up", "1", "--in-flight", "8"]
    one = predict((4, 4), parse_arguments(words), MEASURED)
    two = predict((8, 8), parse_arguments([*words, "--cells", "2"]), MEASURED)
    assert two["turns_per_s"] == pytest.approx(2 * one["turns_per_s"])
    assert two["fixed_of_a_cell"] == one["fixed_of_a_cell"]


def test_a_dying_node_costs_throughput(capsys):
    """Replicas that die together slow the run down, and their requests move."""
    words = (
        "--warm-up",
        "5",
        "--sizes",
        "8x8",
        "--episodes",
        "short",
        "--in-flight",
        "8",
        "--seconds",
        "45",
        "--json",
    )
    rows = []
    for dying in ((), ("--node-dies", "4")):
        main([*words, *dying])
        rows += json.loads(capsys.readouterr().out)["results"]
    assert rows[1]["moved"] > 0 == rows[0]["moved"]
    assert rows[1]["turns_per_s"] < 0.95 * rows[0]["turns_per_s"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--sizes", "3"), "expected workers and replicas"),
        (("--sizes", "0x4"), "at least one worker"),
        (("--sizes", "4x4", "--cells", "3"), "cannot be shared by 3"),
        (("--sizes", "4x4", "--in-flight", "-1"), "at least 1"),
        (("--sizes", "4x4", "--seconds", "0"), "expected a time"),
        (("--sizes", "4x4", "--node-dies", "4"), "cannot die"),
        (("--costs", "nowhere.json"), "cannot read nowhere.json"),
    ],
)
def test_command_refuses(words, reason):
    """A wrong option is a line."""
    with pytest.raises(ConfigError, match=reason):
        main(words)


def test_costs_name_what_is_missing(tmp_path):
    """A file without a cost is refused with its name."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"machine": "m", "costs": {}}), encoding="utf-8")
    with pytest.raises(ConfigError, match="request_send_s"):
        load_costs(path)
