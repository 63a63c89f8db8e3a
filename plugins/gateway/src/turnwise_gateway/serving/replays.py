"""Replays of sessions in a separate run, whose engine gives the recorded turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from attrs import evolve, frozen

from turnwise import EpisodeResult, Host, RolloutManager, RunConfig, Task
from turnwise.types import Capabilities
from turnwise_gateway.control.agent_session import AgentSession
from turnwise_gateway.host import RunningServer
from turnwise_gateway.replay.recorded_engine import RecordedEngine
from turnwise_gateway.replay.replayed_session import DifferenceError, SessionReplay
from turnwise_gateway.replay.request_file import Event, RequestFile
from turnwise_gateway.server import ServerOptions
from turnwise_gateway.serving.served_agent import add_served_agent, model_name
from turnwise_gateway.serving.session_service import SessionService

_ENGINE: Final = "gateway_replay"


@frozen(kw_only=True)
class EndedReplay:
    """
    The end of a replay.

    Attributes:
        records: of the session.
        result: its episode.
        difference: the first call that did not end as recorded; None for none.
    """

    records: Sequence[Event]
    result: EpisodeResult
    difference: str | None


@frozen(eq=False)
class Replays:
    """A run that replays one session after the other."""

    _manager: RolloutManager
    _service: SessionService
    _engine: RecordedEngine

    def run(self, file: RequestFile, end: Callable[[AgentSession], object]) -> EndedReplay:
        """Replay a session in a separate episode; `end` is called after the last recorded event, and ends it."""
        replay = SessionReplay(file, self._engine)
        self._service.make_session = replay.open
        self._service.make_name = lambda: file.session  # ids of responses have it, and later requests may name them
        self._service.numbers[file.task.uid] = file.rollout_n

        async def run(task: Task) -> None:
            served = await self._service.request(task)
            try:
                await replay.run(served.client)
            finally:
                end(served)

        difference: str | None = None
        with self._manager.open(global_step=file.global_step, validation=file.validation) as feed:
            self._service.submit = lambda task, number: feed.submit(task, rollout_n=number)
            try:
                self._manager.call(run(file.task))
            except* DifferenceError as group:
                difference = str(group.exceptions[0])
            feed.close()
            (result,) = feed
            self._manager.call(_note(self._service, result))
        return EndedReplay(records=replay.records, result=result, difference=difference)


@contextmanager
def open_replays(config: RunConfig, host: Host) -> Iterator[Replays]:
    """Start a run like the recorded one, with its own engine and without a reward, inside the `with` statement."""
    # Each file brings the capabilities of its own engine; those until then must not exclude any.
    engine = RecordedEngine(capabilities=Capabilities(grammars=True, pictures=True))
    with host.registry("engines").owned_by("gateway"):
        host.registry("engines").add(_ENGINE, lambda _config, _resources: engine)
    service = SessionService(RunningServer(model_name(config), ServerOptions()), capacity=1)
    config = evolve(
        _without_keys(add_served_agent(config, host, service)),
        engine=evolve(config.agent, name=_ENGINE, options={}),
        runtime=evolve(config.runtime, name="local"),
        observers=(),
        judge=None,
        reward=None,
    )
    with RolloutManager.from_config(config, host) as manager:
        manager.call(service.server.start())
        try:
            yield Replays(manager, service, engine)
        finally:
            manager.call(service.server.stop())


def _without_keys(config: RunConfig) -> RunConfig:
    """Return a config whose other models need no keys, because a replay calls none of them."""
    options = config.agent.options
    models = {
        name: {key: each for key, each in use.items() if key != "api_key_env"} if isinstance(use, Mapping) else use
        for name, use in (options.get("models") or {}).items()
    }
    return evolve(config, agent=evolve(config.agent, options={**options, "models": models})) if models else config


async def _note(service: SessionService, result: EpisodeResult) -> None:
    service.note_result(result)
