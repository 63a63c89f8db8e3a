"""The episodes of sessions that were open when their gateway was killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from attrs import evolve

from turnwise import EpisodeResult, Host, RunConfig, Status
from turnwise.errors import InfrastructureError
from turnwise.types import Fault
from turnwise_gateway.replay.request_file import RequestFile, read_requests
from turnwise_gateway.serving.replays import Replays, open_replays
from turnwise_gateway.serving.session_log import LoggedSession

KILLED: Final = "the gateway was killed while the session was open"
NOT_KEPT: Final = "its turns are lost, because --keep-requests was not given"


def restore_episodes(
    lost: Sequence[LoggedSession], requests: Path, load: Callable[[], tuple[RunConfig, Host]]
) -> list[EpisodeResult]:
    """
    Return the lost sessions as aborted episodes, with the turns that their files of requests have.

    Args:
        lost: without an end.
        requests: folder with a file for each session whose requests were kept.
        load: returns the config of the run and its plugins, for a replay of the requests.
    """
    paths = {each.name: requests / f"{each.name}.jsonl" for each in lost}
    files = {name: read_requests(path) for name, path in paths.items() if path.exists()}
    with ExitStack() as stack:
        replays = stack.enter_context(open_replays(*load())) if any(each.events for each in files.values()) else None
        return [_restore(each, files, replays) for each in lost]


def _restore(session: LoggedSession, files: Mapping[str, RequestFile], replays: Replays | None) -> EpisodeResult:
    file = files.get(session.name)
    if file is None or not file.events or replays is None:
        result = EpisodeResult(
            task=session.task,
            rollout_n=session.rollout_n,
            global_step=session.global_step,
            validation=session.validation,
            status=Status.ABORTED,
        )
        return _blame(result, KILLED if file is not None else f"{KILLED}; {NOT_KEPT}")
    done = replays.run(file, lambda served: served.fail("infra", KILLED))
    message = KILLED if done.difference is None else f"{KILLED}; its later turns cannot be restored: {done.difference}"
    return _blame(done.result, message)


def _blame(result: EpisodeResult, message: str) -> EpisodeResult:
    fault = Fault(owner="infra", kind=InfrastructureError.__name__, message=message)
    return evolve(result, status=Status.ABORTED, fault=fault, scores=())
