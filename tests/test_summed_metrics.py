"""Metrics that the record of an episode adds up: each must mean something as a sum, and levels are never added."""

from __future__ import annotations

import ast
from pathlib import Path

from prometheus_client import CollectorRegistry

from turnwise.events.observer import MemorySwitched, MetricsLogged, RunWaiting, WeightsUpdated
from turnwise_observability.metrics import METRICS, MetricsObserver

ROOT = Path(__file__).parents[1]

SUMMED = {
    # Counts of events, of which each call of the method records one or more.
    "'environment/steps'": "count",
    "'gateway/callers'": "count: processes, once at the end of a program",
    "'gateway/foreign_callers'": "count: connections, once at the end of a program",
    "'gateway/lost_attempts'": "count",
    "'gateway/refused_tool_calls'": "count",
    "'left_behind'": "count",
    "'max_parallel_calls_hit'": "count",
    "SPECIAL_TOKENS_METRIC": "count",
    "f'gateway/records_{each.kind}'": "count",
    "f'gateway/{name}'": "count",
    "f'middleware/{middleware.label}/{what}'": "count",
    "'invalid_actions'": "count",
    "'mcp_restarts'": "count: restarts during this call",
    "LOSSES_METRIC": "count",
    "'programs_passed'": "count",
    "'tool_output_tokens'": "count",
    "note": "count: changes of a middleware",
    "f'sandbox_calls_in_tier_{int(result.tier)}'": "count",
    "'sandbox_wall_s'": "seconds of one call",
    "'reports_left_out'": "count",
    "'workspace_commands'": "count",
    "'workspace_programs'": "count",
    "'workspace_submitted'": "count",
    "'workspace_wall_s'": "seconds of one call",
    "'workspace_warm_failures'": "count: starts of warm workspaces since the last workspace of this worker",
    "'workspace_warm_hits'": "count",
    "'workspace_warm_losses'": "count",
    "'workspace_warm_misses'": "count",
    # Shares, each recorded once in an episode: `Session.close` describes the records at most once.
    "'gateway/auxiliary_share'": "once",
    "'gateway/untrained_share'": "once",
    # Numbers of verifiers, each recorded once in an episode, in the observation that ends it.
    "**rewards": "once",
    "**trace.metrics": "once",
    # Names and numbers of others: code that is documented to add up passes them on.
    "f'agent/{name}'": "passed on: numbers that an agent's program reports once, at its end",
    "f'environment/{name}'": "passed on: metrics of an observation",
    "f'tool/{name}'": "passed on: metrics of a tool result",
    "name": "passed on: a metric of a reward in a reward worker, or of the method itself",
    "str(name)": "passed on: metrics of a tool of verl",
    "**result.metrics": "passed on: metrics of the result that a middleware changes",
}
"""Every name, as the sources spell it, under which an episode records something, and why a sum means something."""

RECORDERS = {"record_metric", "add_extra", "record"}
RESULTS = {"ToolResult", "Observation"}


def recorded_names(tree: ast.AST) -> set[str]:
    """Return the expressions of all names of metrics that a module records in an episode."""
    found: set[str] = set()
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if function in RECORDERS and len(call.args) == 2:
            found.add(ast.unparse(call.args[0]))
        for word in call.keywords:
            changed = function == "evolve" and isinstance(word.value, ast.Dict)
            if word.arg == "metrics" and (function in RESULTS or changed):
                found |= names_of(tree, word.value)
    return found


def names_of(tree: ast.AST, value: ast.expr) -> set[str]:
    """Return the keys of a mapping: of a literal, of a comprehension, or of the variable that holds one."""
    if isinstance(value, ast.Name):
        assigned = [
            each.value
            for each in ast.walk(tree)
            if isinstance(each, ast.Assign)
            and ast.unparse(each.targets[0]) == value.id
            and isinstance(each.value, ast.Dict)
        ]
        assert assigned, f"the metrics {value.id!r} come from elsewhere: let this test find their names"
        return set().union(*(names_of(tree, each) for each in assigned))
    if isinstance(value, ast.DictComp):
        return {ast.unparse(value.key)}
    assert isinstance(value, ast.Dict), f"let this test find the names in {ast.unparse(value)}"
    pairs = zip(value.keys, value.values, strict=True)
    return {f"**{ast.unparse(each)}" if key is None else ast.unparse(key) for key, each in pairs}


def test_every_recorded_metric_means_something_as_a_sum():
    """Each name in the sources of core, libraries and plugins is in the table above, and the table has no other."""
    paths = [path for pattern in ("core", "libs/*", "plugins/*") for path in ROOT.glob(f"{pattern}/src/**/*.py")]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    trees = [ast.parse(each) for each in texts if "metrics=" in each or any(f"{name}(" in each for name in RECORDERS)]

    assert set().union(*map(recorded_names, trees)) == set(SUMMED)


def test_a_recorded_level_is_found():
    """A module that records a level under a new name fails the test above."""
    tree = ast.parse("episode.record_metric('tier', 3)\nToolResult(text='', metrics={'depth': 2})")

    assert recorded_names(tree) == {"'tier'", "'depth'"}


def test_every_gauge_of_prometheus_has_the_last_level():
    """The same events twice: a level is as after the first, and so is no sum."""
    gauges = {metric.name for metric in METRICS if metric.kind == "gauge"}
    # The first is a number of episodes, up at their start and down at their end, and the second is a rate.
    gauges -= {"turnwise_episodes_in_flight", "turnwise_sampled_tokens_per_second"}
    registry = CollectorRegistry()
    observer = MetricsObserver(registry)
    levels = []
    for _ in range(2):
        observer.on_run_waiting(RunWaiting(seconds=12.5))
        observer.on_weights_updated(WeightsUpdated(version=9, seconds=0.25, replica=1))
        observer.on_memory_switched(
            MemorySwitched(stage="sleep", seconds=0.75, bytes_before=100, bytes_after=10, replica=1)
        )
        observer.on_metrics_logged(MetricsLogged(step=7, values={"reward/mean": 0.5}))
        samples = [sample for family in registry.collect() for sample in family.samples if sample.name in gauges]
        levels.append({sample.name: sample.value for sample in samples})

    assert levels[0] == levels[1]
    assert set(levels[0]) == gauges
    assert set(levels[0].values()) == {12.5, 9.0, 100.0, 10.0, 7.0, 0.5}
