"""
Logs and observers: the one place that configures structlog, and the dispatcher of events.

Anyone may call ``structlog.get_logger()``; only `configure_logging` says where lines go. The dispatcher builds one
tuple of methods per event when an observer is added, so an event that nobody overrides costs one empty loop.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, TextIO

import structlog
from attrs import define, field, frozen

from turnwise.observer import Observer, RequestRouted
from turnwise.result import EpisodeResult

LogFormat = Literal["auto", "console", "json"]
EVENTS = tuple(name for name in vars(Observer) if name.startswith("on_"))


def configure_logging(level: str = "info", log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """
    Send every log line of this process to one stream.

    Args:
        level: debug, info, warning or error.
        log_format: `console` for people, `json` for one JSON object per line, `auto` for console on a terminal.
        stream: standard error when None.
    """

    def make_logger(*_arguments: object) -> structlog.PrintLogger:
        # Looked up for each logger: standard error may be replaced, as notebooks and tests do.
        return structlog.PrintLogger(sys.stderr if stream is None else stream)

    console = log_format == "console" or (log_format == "auto" and (stream or sys.stderr).isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if console else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=make_logger,
        # A cached logger cannot be pickled after its first line, and would outlive a change of stream.
        cache_logger_on_first_use=False,
    )


class EpisodeLog(Observer):
    """The observer `episode_log`: a log line per finished episode, with what it cost and how it ended."""

    def on_episode_finished(self, event: EpisodeResult) -> None:
        """Log the seconds of model and tools, turns, tokens by origin, mask ratio and status."""
        metrics, fault = event.metrics, event.fault
        structlog.get_logger().info(
            "episode finished",
            episode=event.uid,
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
        )


@frozen
class RoutingLogConfig:
    """
    Options of `routing_log`.

    Attributes:
        sticky: also log requests of an episode that stays where it is: nearly all.
    """

    sticky: bool = True


@define(eq=False)
class RoutingLog(Observer):
    """The observer `routing_log`: a log line per decision of a router, with the replica and why."""

    config: RoutingLogConfig = field(factory=RoutingLogConfig)

    def on_request_routed(self, event: RequestRouted) -> None:
        """Log which replica continues a trajectory."""
        if event.kind != "sticky" or self.config.sticky:
            structlog.get_logger().info(
                "request routed",
                trajectory=event.trajectory_id,
                replica=event.replica,
                kind=event.kind,
                reason=event.reason,
                worker=event.worker,
            )


@define
class Observers:
    """
    The observers of a run, asked in the order in which they were added.

    An observer that raises is switched off and logged once; the run goes on.
    """

    _observers: list[Observer] = field(factory=list, init=False)
    _listeners: dict[str, tuple[Callable[[Any], None], ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with nobody listening."""
        self._rebuild()

    @classmethod
    def of(cls, observers: Iterable[Observer]) -> Observers:
        """Return a dispatcher to these observers."""
        dispatcher = cls()
        for observer in observers:
            dispatcher.add(observer)
        return dispatcher

    def add(self, observer: Observer) -> None:
        """Listen with one more observer, to the events whose methods its class overrides."""
        self._observers.append(observer)
        self._rebuild()

    def open(self) -> None:
        """Let every observer get ready; what one raises is passed on."""
        for observer in self._observers:
            observer.open()

    def close(self) -> None:
        """Let every observer write what is left; one that raises stops no other."""
        for observer in self._observers:
            try:
                observer.close()
            except Exception:  # noqa: BLE001 - the run is over, and its results are not the observer's business
                structlog.get_logger().exception("observer did not close", observer=type(observer).__qualname__)

    def names(self) -> frozenset[str]:
        """Return the names of the events that somebody listens to."""
        return frozenset(name for name, listeners in self._listeners.items() if listeners)

    def heard(self, event_name: str) -> bool:
        """Return whether anybody listens; ask before making an event that costs something to make."""
        return bool(self._listeners[event_name])

    def emit(self, event_name: str, event: object) -> None:
        """Tell everyone who listens to this event."""
        for listener in self._listeners[event_name]:
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - whatever an observer does, the run is not its business
                self._switch_off(listener, event_name)

    def _switch_off(self, listener: Callable[[Any], None], event_name: str) -> None:
        observer = listener.__self__  # type: ignore[attr-defined]  # listeners are bound methods
        self._observers = [other for other in self._observers if other is not observer]
        self._rebuild()
        structlog.get_logger().exception(
            "observer switched off", observer=type(observer).__qualname__, event_name=event_name
        )

    def _rebuild(self) -> None:
        self._listeners = {
            name: tuple(
                getattr(observer, name)
                for observer in self._observers
                if getattr(type(observer), name) is not getattr(Observer, name)
            )
            for name in EVENTS
        }
