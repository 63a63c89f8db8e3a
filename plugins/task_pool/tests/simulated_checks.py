"""The promises of gateway sessions, checked on an episode and on the replies of its clients."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from simulated_clients import MARK, Attempt, mark_of

from turnwise import EpisodeResult, Status
from turnwise.types import TrajectoryScore, TurnScore
from turnwise_testing.probes.agent import probe_chat
from turnwise_testing.simulation.tracing import check_episode, digest_of


def check(result: EpisodeResult, all_attempts: Sequence[Attempt], handed: Mapping[str, str]) -> None:
    """
    Raise `AssertionError` for a promise that an episode breaks; the text starts with the promise.

    Args:
        result: of the episode.
        all_attempts: of all episodes.
        handed: text of each reply that the system took whole, by its id.
    """
    attempts = [attempt for attempt in all_attempts if attempt.uid == result.task.uid]
    for attempt in attempts:
        if attempt.violations:
            raise AssertionError(attempt.violations[0])
        check_independent(attempt)
    try:
        check_episode(result, {0: digest_of({})})
    except AssertionError as error:
        raise AssertionError(f"context: {error}") from None
    trained = Counter(
        mark
        for record, is_trained in zip(result.trajectories, result.trained, strict=True)
        if is_trained
        for mark in marks_of(record)
    )
    reason = result.fault.message if result.fault else ""
    if result.status is Status.TIMED_OUT:
        raise AssertionError(f"hangs: nothing but its deadline ended the episode: {reason}")
    # The newest, because no lease follows an accepted end; an agent may have died before it read the response.
    # The fence decides: an agent may read the response with an older lease after another agent got a newer one.
    ending = [attempt for attempt in reversed(attempts) if attempt.is_ending]
    last = max(ending, key=lambda attempt: attempt.fence, default=None)
    if last is None:
        if result.status is Status.COMPLETED:
            raise AssertionError("status: an episode is completed without an end by its agent")
        return
    if len(trained) == 0 and result.status is Status.COMPLETED and last.scores:
        raise AssertionError(f"nothing sampled: an episode with reward {result.reward} has no trained token")
    if result.status is not Status.COMPLETED:
        if last.required and last.is_completed:
            raise AssertionError(f"status: an episode with turns is {result.status}: {reason}")
        return
    check_trained(last, trained, handed)
    check_scores(result, last)


def check_independent(attempt: Attempt) -> None:
    """Raise unless each request has another turn."""
    requests: dict[str, str] = {}
    for read in attempt.reads:
        if requests.setdefault(read.id, read.request) != read.request:
            raise AssertionError(f"independent samples: {requests[read.id]} and {read.request} got one turn")


def check_trained(last: Attempt, trained: Counter[str], handed: Mapping[str, str]) -> None:
    """Raise unless each turn that a client read is trained once, and no turn that no client can have read."""
    for read in last.required:
        if trained[read.mark] == 0:
            raise AssertionError(f"read turns: the turn of {read.request} was read and is not trained")
    if doubles := [mark for mark, number in trained.items() if number > 1]:
        raise AssertionError(f"trained once: turns {doubles} are trained more than once")
    sent = {mark_of(text) for name, text in handed.items() if f"-{last.session}-" in name}
    if unread := set(trained) - sent - {read.mark for read in last.reads}:
        raise AssertionError(f"unread turns: {sorted(unread)} are trained, and no client can have read them")


def check_scores(result: EpisodeResult, last: Attempt) -> None:
    """Raise unless each accepted score lies on its turn, its record or the session."""
    if not last.scores:
        return
    if last.kind == "session":
        if result.reward != 0.5:
            raise AssertionError(f"scores: the reward is {result.reward}, and 0.5 was accepted")
        return
    found: dict[str, float] = {}
    for record, score in zip(result.trajectories, result.scores, strict=True):
        marks = marks_of(record)
        if isinstance(score, TurnScore):
            found |= {mark: value for mark, value in zip(marks, score.values, strict=True) if value}
        elif isinstance(score, TrajectoryScore) and score.value:
            found |= {mark: score.value for mark in marks if mark in last.scores}
    wanted = {mark: value for mark, value in last.scores.items() if value}
    more = {mark: value for mark, value in found.items() if mark not in wanted}
    if wanted.items() - found.items() or more.items() - set(last.in_doubt):
        raise AssertionError(f"scores: {last.kind} have {found}, and {wanted} were accepted")


def marks_of(record: Any) -> list[str]:
    """Return the mark of each sampled turn of a record."""
    texts = [probe_chat().text(record.input_ids[start:stop]) for start, stop in record.turns()]
    return [mark for text in texts for mark in MARK.findall(text)]
