"""The observer `routing_log`."""

from structlog.testing import capture_logs

from turnwise.events.dispatch import Observers
from turnwise.events.observer import RequestRouted
from turnwise_observability.config import RoutingLogConfig
from turnwise_observability.routing_log import RoutingLog


def test_the_routing_log_has_a_line_per_decision():
    """
    Key of the episode, replica and reason; requests that stay where they are can be left out.
    """
    kinds = [("first", "prefix"), ("sticky", "sticky"), ("migrated", "overloaded")]
    events = [
        RequestRouted(trajectory_id="t1/2", key="t1", replica=2, kind=k, reason=r, worker="worker 0") for k, r in kinds
    ]
    lines = []
    for sticky in (True, False):
        observers = Observers.of([RoutingLog(RoutingLogConfig(sticky=sticky))])
        with capture_logs() as logs:
            for event in events:
                observers.emit("on_request_routed", event)
        lines.append([(line["key"], line["replica"], line["reason"]) for line in logs])

    assert [("t1", 2, "prefix"), ("t1", 2, "sticky"), ("t1", 2, "overloaded")] == lines[0]
    assert [lines[0][0], lines[0][2]] == lines[1]
