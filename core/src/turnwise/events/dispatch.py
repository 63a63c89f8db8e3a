"""
Delivery of events to observers.

The dispatcher builds one tuple of methods per event when an observer is added, so an event that no observer overrides
costs one empty loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from threading import current_thread, main_thread

import structlog
from attrs import define, field

from turnwise.errors import PluginError, class_name, describe
from turnwise.events.observer import Observer

EVENTS = tuple(name for name in vars(Observer) if name.startswith("on_"))


@define
class Observers:
    """
    The observers of a run, called in the order in which they were added.

    An observer that raises is switched off and logged once; the run continues.
    """

    _observers: list[Observer] = field(factory=list, init=False)
    _listeners: dict[str, tuple[Callable[..., None], ...]] = field(init=False)
    _held: str = field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self._rebuild()

    @classmethod
    def of(cls, observers: Iterable[Observer]) -> Observers:
        dispatcher = cls()
        for observer in observers:
            dispatcher.add(observer)
        return dispatcher

    def add(self, observer: Observer) -> None:
        """Add an observer; it receives the events whose methods its class overrides."""
        self._observers.append(observer)
        self._rebuild()

    def open(self) -> None:
        """Open every observer; an exception stops the run."""
        for observer in self._observers:
            try:
                observer.open()
            except Exception as error:
                raise PluginError(f"observer {class_name(observer)} does not open: {describe(error)}") from error

    def close(self) -> None:
        """Close every observer; one that raises stops no other."""
        for observer in self._observers:
            try:
                observer.close()
            except Exception:  # noqa: BLE001 - the run is over; an observer must not cost its results
                structlog.get_logger().exception("observer did not close", observer=type(observer).__qualname__)

    def names(self) -> frozenset[str]:
        """Return the names of the events that have listeners."""
        return frozenset(name for name, listeners in self._listeners.items() if listeners)

    def heard(self, event_name: str) -> bool:
        """Return whether an event has listeners; ask before building an expensive event."""
        return bool(self._listeners[event_name])

    def hold(self, event_name: str) -> Callable[[object], None]:
        """Let `emit` drop an event from now on, and return a function that emits it later."""
        self._held = event_name
        return partial(self._emit, event_name)

    def emit(self, event_name: str, event: object) -> None:
        if event_name != self._held:
            self._emit(event_name, event)

    def _emit(self, event_name: str, event: object) -> None:
        for listener in self._listeners[event_name]:
            try:
                listener(event)
            except BaseException as error:  # a failing observer must not stop the run
                if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                    raise  # the user's
                self._switch_off(listener, event_name)

    def _switch_off(self, listener: Callable[..., None], event_name: str) -> None:
        observer = listener.__self__  # type: ignore[attr-defined]  # listeners are bound methods
        self._observers = [other for other in self._observers if other is not observer]
        self._rebuild()
        structlog.get_logger().exception("observer switched off", observer=class_name(observer), event_name=event_name)

    def _rebuild(self) -> None:
        base = vars(Observer)
        self._listeners = {
            name: tuple(getattr(each, name) for each in self._observers if getattr(type(each), name) is not base[name])
            for name in EVENTS
        }
