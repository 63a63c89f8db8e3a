"""The observer `episode_log`: log lines of finished episodes, weight updates and memory switches."""

from __future__ import annotations

import structlog

from turnwise import EpisodeResult, Observer
from turnwise.events.observer import MemorySwitched, WeightsUpdated


class EpisodeLog(Observer):
    """
    The observer `episode_log`: a log line per finished episode, with its counts, times, status and recorded metrics.

    Each weight update of a replica has a line too, and so has each sleep, wake-up and other switch of device memory,
    with its seconds and the memory before and after it. Replica -1 is the trainer.

    On Ray the driver writes the lines: Ray adds a prefix to lines of other processes.
    """

    place = "driver"

    def on_episode_finished(self, event: EpisodeResult) -> None:
        metrics, fault = event.metrics, event.fault
        structlog.get_logger().info(
            "episode finished",
            episode=event.uid,
            key=event.key,
            worker=event.worker,
            agent=event.agent_name,
            status=str(event.status),
            fault=f"{fault.owner}: {fault.kind}: {fault.message}" if fault else None,
            limit=str(event.limit) if event.limit else None,
            reward=event.reward,
            turns=metrics.num_turns,
            tool_calls=metrics.num_tool_calls,
            tool_errors=metrics.num_tool_errors,
            llm_s=round(metrics.llm_s, 4),
            tool_s=round(metrics.tool_s, 4),
            total_s=round(metrics.total_s, 4),
            tokens=dict(metrics.num_tokens),
            mask_ratio=round(metrics.mask_ratio, 4),
            replicas=list(metrics.replicas),
            extra=dict(metrics.extra),
        )

    def on_weights_updated(self, event: WeightsUpdated) -> None:
        structlog.get_logger().info(
            "weights updated",
            version=event.version,
            replica=event.replica,
            seconds=round(event.seconds, 4),
            num_bytes=event.num_bytes,
        )

    def on_memory_switched(self, event: MemorySwitched) -> None:
        structlog.get_logger().info(
            "memory switched",
            stage=event.stage,
            replica=event.replica,
            seconds=round(event.seconds, 4),
            bytes_before=event.bytes_before,
            bytes_after=event.bytes_after,
        )
