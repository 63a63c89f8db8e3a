"""
The flat vocabulary of what can go wrong, named after the boundary that was crossed.

Plugins raise ordinary exceptions; the core's `boundary` says whose code was running. This module does not decide
what happens next: a bad config stops a run, a bad episode is data (see `turnwise.types.Fault`).
"""

from __future__ import annotations

from asyncio import CancelledError, current_task
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Owner = Literal["agent", "data", "engine", "infra", "reward", "tool"]
"""Whose fault a failed episode is; `infra` is nobody's in this process and is masked from the loss."""


class TurnwiseError(Exception):
    """Anything turnwise raises on purpose. Its text is one line that a user can act on."""


class ConfigError(TurnwiseError):
    """A config file, an override or a command line is wrong; the text names the path and what was expected."""


class DataError(TurnwiseError):
    """A data set, or a row of it, cannot be used; the text names the file and the row."""


class PluginError(TurnwiseError):
    """A plugin cannot be found, imported, or is not what a run asked for."""


class DuplicateNameError(PluginError):
    """Two plugins registered one name; the text names both owners."""


class TrajectoryError(TurnwiseError, ValueError):
    """An append, fork or join that the token record cannot represent."""


class InvariantError(TurnwiseError):
    """A trajectory breaks a promise of the token record; the text names which and where."""


class TemplateError(TurnwiseError):
    """A chat template cannot be used by appending messages only; the text says what disagrees."""


class EngineError(TurnwiseError):
    """An engine failed or was asked for something that it cannot do in its state."""


class ReplicaDiedError(EngineError):
    """The replica behind a request is gone; the episode may go on elsewhere from its own tokens."""


class AsleepError(EngineError):
    """The replica behind a request sleeps; another one may serve it."""


class TornWeightsError(EngineError):
    """A weight update failed half-way: the replica serves nothing until a whole one has succeeded."""


class InfrastructureError(TurnwiseError):
    """A machine, network or service failed under a tool, reward or engine: never the model's doing."""


class ToolError(TurnwiseError):
    """A tool refused its arguments; the text becomes the observation that the model reads."""


class EpisodeEnd(TurnwiseError):  # noqa: N818 - a signal that ends an episode in good order, not an error
    """Base of the signals by which the core ends an episode out of an agent's step."""


class BudgetExhausted(EpisodeEnd):
    """The next tokens do not fit the response budget or the context: the episode is `truncated`."""


class DeadlineExceeded(EpisodeEnd):
    """A turn's or the episode's deadline passed: the episode is `timed_out`."""


class EpisodeAborted(EpisodeEnd):
    """The driver asked the episode to stop: it is `aborted`."""


class BoundaryError(TurnwiseError):
    """Plugin code raised. `owner` says whose it was; the cause is chained."""

    def __init__(self, owner: Owner, where: str, cause: BaseException) -> None:
        super().__init__(f"{where}: {type(cause).__name__}: {cause}")
        self.owner: Owner = owner
        self.where = where
        self.cause = cause


def cancelled_by_nobody() -> bool:
    """Return whether the running task was not asked to end: a `CancelledError` in it is then an error like another."""
    task = current_task()
    return task is not None and not task.cancelling()


@contextmanager
def boundary(owner: Owner, where: str) -> Iterator[None]:
    """
    Say whose code is running: any exception inside leaves as a `BoundaryError` of that owner.

    Episode ends and boundaries further in pass unchanged, and so does the cancellation of the task that runs; one that
    nobody asked for, such as that of a task which a plugin awaits, is the plugin's failure. An `InfrastructureError` is
    owned by `infra` and an `EngineError` by `engine`, whoever was running.

    Args:
        owner: whose code runs inside.
        where: what it does, for the text, such as `reward 'exact_match'`.
    """
    try:
        yield
    except (EpisodeEnd, BoundaryError, KeyboardInterrupt, GeneratorExit):
        raise
    except CancelledError as error:
        if not cancelled_by_nobody():
            raise
        raise BoundaryError(owner, where, error) from error
    except InfrastructureError as error:
        raise BoundaryError("infra", where, error) from error
    except EngineError as error:
        raise BoundaryError("engine", where, error) from error
    except BaseException as error:
        # A plugin that calls sys.exit() ends its own episode, not the process.
        raise BoundaryError(owner, where, error) from error
