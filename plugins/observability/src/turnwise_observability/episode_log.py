"""The observer `episode_log`: a log line for each finished episode."""

from __future__ import annotations

import structlog

from turnwise import EpisodeResult, Observer


class EpisodeLog(Observer):
    """
    The observer `episode_log`: a log line per finished episode, with its counts, times, status and recorded metrics.

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
