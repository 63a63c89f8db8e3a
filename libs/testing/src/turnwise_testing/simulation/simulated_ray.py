"""
Actors of Ray on one simulated event loop, so that the whole Ray runtime runs in a simulation.

Each actor has an inbox. Calls start in any order, since those with large arguments are later in Ray than small ones.
Arguments and results are pickled, and replies are late. A killed actor loses its connections, its tasks and its
replies. Its threads run on, and their results are lost.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from attrs import define, field

from turnwise.runtime.ray import replica_actor, worker_actor
from turnwise_testing.simulation.network import Delay, Network

_RUNNING: Final[ContextVar[SimulatedActor | None]] = ContextVar("the actor whose code runs", default=None)


class ActorDiedError(Exception):
    """The actor of a call is dead."""


class _Reply(Awaitable[Any]):
    """An `ObjectRef`: a waiter that gives up does not end the call."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self.future).__await__()

    def settle(self, outcome: object, error: BaseException | None) -> None:
        if not self.future.done():
            if error is None:
                self.future.set_result(outcome)
            else:
                self.future.set_exception(error)


@define(eq=False)
class SimulatedActor:
    """
    One actor: its object, its inbox and its tasks.

    Attributes:
        kind: class of the object.
        instance: the object; None before it is built.
        is_dead: it was killed, or its constructor failed.
    """

    cluster: SimulatedRay
    kind: type
    name: str
    node: str
    instance: Any = None
    is_dead: bool = False
    tasks: list[asyncio.Task[Any]] = field(factory=list)
    _inbox: asyncio.Queue[tuple[str, bytes, _Reply]] = field(factory=asyncio.Queue)
    _replies: list[_Reply] = field(factory=list)

    def call(self, name: str, *arguments: object) -> _Reply:
        reply = _Reply()
        if self.is_dead:
            self._fail(reply)
        else:
            self._replies.append(reply)
            call = name, pickle.dumps(arguments), reply
            asyncio.get_running_loop().call_later(self.cluster.delay(), self._inbox.put_nowait, call)
        return reply

    async def live(self, arguments: tuple[object, ...]) -> None:
        """Build the object, and start the calls in the order of their arrival."""
        _RUNNING.set(self)
        await asyncio.sleep(self.cluster.start_s())
        try:
            self.instance = self.kind(*arguments)
        except Exception:
            self.die()
            raise
        while True:
            name, pickled, reply = await self._inbox.get()
            started = asyncio.Event()
            asyncio.get_running_loop().create_task(self._run(name, pickled, reply, started))
            await started.wait()

    def die(self) -> None:
        """End like a process that is killed."""
        if not self.is_dead:
            self.is_dead = True
            self.cluster.network.lose_all(self, self.cluster.delay)
            for task in self.tasks:
                task.cancel()
            for reply in self._replies:
                self._fail(reply)

    async def _run(self, name: str, pickled: bytes, reply: _Reply, started: asyncio.Event) -> None:
        started.set()  # nothing else runs until the first wait of the call
        outcome, error = None, None
        try:
            outcome = pickle.loads(pickle.dumps(await getattr(self.instance, name)(*pickle.loads(pickled))))
        except Exception as raised:  # noqa: BLE001 - raised where the reply is awaited
            error = raised
        if not self.is_dead:
            self._replies.remove(reply)
            asyncio.get_running_loop().call_later(self.cluster.delay(), reply.settle, outcome, error)

    def _fail(self, reply: _Reply) -> None:
        error = ActorDiedError(f"{self.name} is dead")
        asyncio.get_running_loop().call_later(self.cluster.delay(), reply.settle, None, error)


class _Method:
    def __init__(self, call: Callable[..., _Reply]) -> None:
        self.remote = call

    def options(self, **_options: object) -> _Method:
        return self


class _Handle:
    """An actor, as its callers see it."""

    def __init__(self, actor: SimulatedActor) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Method(partial(self.actor.call, name))


@define(eq=False)
class SimulatedRay:
    """
    A cluster; `installed` puts it in the place of the module `ray`.

    Attributes:
        delay: seconds of a call or a reply on its way.
        start_s: seconds until an actor starts.
        nodes: names of the machines.
        draining: nodes that will be removed, with their deadlines in Unix milliseconds.
        actors: all actors so far, in the order of their start.
    """

    network: Network
    delay: Delay
    start_s: Delay
    nodes: tuple[str, ...] = ("a", "b", "c")
    draining: dict[str, int] = field(factory=dict, init=False)
    actors: list[SimulatedActor] = field(factory=list, init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.network.owner = _RUNNING.get

    def live(self, kind: type) -> list[SimulatedActor]:
        """Return the living actors of a class."""
        return [each for each in self.actors if each.kind is kind and not each.is_dead]

    def prepare(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let a loop use the network, and note which actor starts each task."""
        self.network.install(loop)
        self._loop = loop
        make_task: Any = loop.get_task_factory()

        def make_owned_task(loop: asyncio.AbstractEventLoop, code: object, **options: object) -> asyncio.Task[Any]:
            task: asyncio.Task[Any] = make_task(loop, code, **options)
            actor = _RUNNING.get()
            if actor is not None:
                actor.tasks.append(task)
                task.add_done_callback(actor.tasks.remove)
            return task

        loop.set_task_factory(make_owned_task)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the module `ray` and the setup of an actor's process. This process cannot use Ray any more."""
        modules: tuple[Any, ...] = (replica_actor, worker_actor)
        prepare_process = modules[0].prepare_process
        sys.modules["ray"] = self._module()  # a namespace is enough for `import`
        for module in modules:
            module.prepare_process = _noop
        try:
            yield
        finally:
            for module in modules:
                module.prepare_process = prepare_process
            # Not the real module again: tasks that a stuck run leaves behind would start a real cluster. The type is
            # ignored because the stand-in is no module.
            sys.modules["ray"] = SimpleNamespace(kill=lambda _handle: None)  # type: ignore[assignment]

    def _module(self) -> Any:
        return SimpleNamespace(
            is_initialized=lambda: True,
            shutdown=lambda: None,
            nodes=lambda: [{"NodeID": node, "Alive": True, "Resources": {}} for node in self.nodes],
            remote=self._actor_class,
            kill=lambda handle: handle.actor.die(),
            get_runtime_context=_runtime_context,
            util=SimpleNamespace(
                get_node_ip_address=lambda: "127.0.0.1",
                client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)),
            ),
            _private=SimpleNamespace(
                state=SimpleNamespace(state=SimpleNamespace(get_draining_nodes=lambda: dict(self.draining)))
            ),
        )

    def _actor_class(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=partial(self._start, kind, options)))

    def _start(self, kind: type, options: dict[str, Any], *arguments: object) -> _Handle:
        staying = [node for node in self.nodes if node not in self.draining]
        node = staying[len(self.actors) % len(staying)]
        actor = SimulatedActor(self, kind, str(options["name"]), node)
        self.actors.append(actor)

        def begin() -> None:
            # The task belongs to the actor from the first step on, so that the actor's death ends it.
            _RUNNING.set(actor)
            self._loop.create_task(actor.live(arguments))

        # The driver starts actors in threads. No other callback may see that an actor runs, so the context is a copy.
        self._loop.call_soon_threadsafe(begin, context=copy_context())
        return _Handle(actor)


def _runtime_context() -> Any:
    actor = _RUNNING.get()
    assert actor is not None
    return SimpleNamespace(get_node_id=lambda: actor.node, get_accelerator_ids=lambda: {"GPU": []})


def _noop() -> None:
    """Do nothing: the process does not belong to the actor."""
