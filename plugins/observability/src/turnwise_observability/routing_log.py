"""The observer `routing_log`: a log line for each decision of a router."""

from __future__ import annotations

import structlog
from attrs import define, field

from turnwise import Observer
from turnwise.events.observer import RequestRouted
from turnwise_observability.config import RoutingLogConfig


@define(eq=False)
class RoutingLog(Observer):
    """Logs the replica of each request, and the reason, with the key that `episode_log` logs too."""

    place = "driver"
    config: RoutingLogConfig = field(factory=RoutingLogConfig)

    def on_request_routed(self, event: RequestRouted) -> None:
        if event.kind != "sticky" or self.config.sticky:
            structlog.get_logger().info(
                "request routed",
                key=event.key,
                trajectory=event.trajectory_id,
                replica=event.replica,
                kind=event.kind,
                reason=event.reason,
                worker=event.worker,
            )
