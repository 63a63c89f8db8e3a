"""
The exceptions of turnwise, named after the boundary at which they occur.

Plugins raise ordinary exceptions; the core's `boundary` attributes them to an owner. The handling is elsewhere: a bad
config stops a run, a bad episode is data (see `turnwise.types.Fault`).
"""

from __future__ import annotations

from typing import Literal

Owner = Literal["agent", "data", "engine", "infra", "reward", "tool"]
"""The owner of a failure; the loss leaves out episodes that failed because of `infra`, such as a lost machine."""


class TurnwiseError(Exception):
    """Anything turnwise raises on purpose. Its text is one line that a user can act on."""


class ConfigError(TurnwiseError):
    """A config file, an override or a command line is wrong; the text names the path and the expected value."""


class DataError(TurnwiseError):
    """A data set, or a row of it, cannot be used; the text names the file and the row."""


class PromptTooLongError(DataError):
    """A prompt has more tokens than the run takes, and the policy does not shorten it; 0 for an unknown number."""

    def __init__(self, text: str, *, num_tokens: int = 0, max_tokens: int = 0) -> None:
        super().__init__(text)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class PluginError(TurnwiseError):
    """A plugin cannot be found or imported, or differs from the one that the run needs."""


class WrapperError(PluginError):
    """A plugin's hook that wraps a part raised, or returned something else; the text names the plugin and the hook."""


class DuplicateNameError(PluginError):
    """Two plugins registered one name; the text names both owners."""


class TrajectoryError(TurnwiseError, ValueError):
    """An append, fork or join that the token record cannot represent."""


class InvariantError(TurnwiseError):
    """A trajectory breaks a promise of the token record; the text names the promise and the place."""


class TemplateError(TurnwiseError):
    """A chat template cannot be used by appending messages only; the text names the difference."""


class EngineError(TurnwiseError):
    """An engine failed, or refuses a call in its state."""


class GrammarError(EngineError):
    """The grammar of a turn fails: it is wrong or too large. The engine is well, and so is the rest of the episode."""


class ReplicaDiedError(EngineError):
    """The replica of a request died; the episode can continue on another one from its own tokens."""


class AsleepError(EngineError):
    """The replica of a request sleeps; another one may serve the request."""


class TornWeightsError(EngineError):
    """A weight update failed half-way: the replica refuses requests until a complete update succeeds."""


class InfrastructureError(TurnwiseError):
    """A machine, network or service failed under a tool, reward or engine: never the model's doing."""


class LostResourceError(InfrastructureError):
    """
    Something that an episode had for itself alone is lost, such as its workspace.

    The episode runs again, up to `rollout.episode_tries` times in all; on Ray another worker runs it, if one has room.
    Raise this class itself, because results keep the name of an error.
    """


class ToolError(TurnwiseError):
    """A tool refused its arguments; the text becomes the observation that the model reads."""


class EpisodeEnd(TurnwiseError):  # noqa: N818 - a signal that ends an episode normally, not an error
    """Base of the signals by which the core ends an episode out of an agent's step."""


class BudgetExhausted(EpisodeEnd):
    """
    The next tokens do not fit the response budget or the context: the episode is `truncated`; the text has the reason.

    `limit` and `value` are those of `turnwise.record.limit.ReachedLimit`. Without them, it is the limit of the
    last record.
    """

    def __init__(self, text: str = "", *, limit: str = "", value: int | None = None) -> None:
        super().__init__(text)
        self.limit = limit
        self.value = value


class DeadlineExceeded(EpisodeEnd):
    """A turn's or the episode's deadline passed: the episode is `timed_out`."""


class EpisodeAborted(EpisodeEnd):
    """The driver asked the episode to stop: it is `aborted`."""


class BoundaryError(TurnwiseError):
    """Plugin code raised. `owner` is the owner of the code; the cause is chained."""

    def __init__(self, owner: Owner, where: str, cause: BaseException) -> None:
        super().__init__(f"{where}: {type(cause).__name__}: {text_of(cause)}")
        self.owner: Owner = owner
        self.where = where
        self.cause = cause


def is_cancelled() -> bool:
    """
    Return whether the running task is being cancelled; True outside a task or a running loop.

    A `CancelledError` in any other task comes from something that the task awaits. It is an ordinary error.
    """
    from asyncio import current_task  # here, because programs that run no loop import this module

    try:
        task = current_task()
    except RuntimeError:  # no loop runs: the interpreter closes a coroutine that never ended
        return True
    return task is None or task.cancelling() > 0


def text_of(error: BaseException) -> str:
    """Return the text of an exception; the class of a plugin may fail to make it."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - whoever handles the first error must not fail with the second
        return f"its text cannot be read: {type(failure).__name__}"


def describe(error: BaseException) -> str:
    """Return an exception as one line: its class and its text."""
    return f"{type(error).__name__}: {' '.join(text_of(error).split())}"


def class_name(part: object) -> str:
    """Return the class of a part and its module, to name the part in an error."""
    return f"{type(part).__qualname__} of {type(part).__module__}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its class where there is no text."""
    lines = text_of(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class boundary:  # noqa: N801 - reads as a statement: `with boundary(...)`
    """
    Attribute the code inside to an owner: its exceptions become `BoundaryError`s of that owner.

    Signals that end an episode, inner boundaries and the cancellation of the running task pass unchanged. A
    cancellation from elsewhere, for example of a task that a plugin awaits, is the plugin's failure. `infra` owns every
    `InfrastructureError`, and `engine` every `EngineError`, whatever code was running.

    Args:
        owner: of the code inside.
        where: name of the code, for the text, such as `reward 'exact_match'`.
    """

    # A class and no generator, because every turn passes several boundaries.
    __slots__ = ("owner", "where")

    def __init__(self, owner: Owner, where: str) -> None:
        self.owner: Owner = owner
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, EpisodeEnd | BoundaryError):
            return
        from asyncio import CancelledError

        if isinstance(error, CancelledError | GeneratorExit) and is_cancelled():
            return
        owner = self.owner
        if isinstance(error, InfrastructureError):
            owner = "infra"
        elif isinstance(error, EngineError):
            owner = "engine"
        # A plugin that calls sys.exit() ends its own episode, not the process. Nor is a `KeyboardInterrupt` the user's:
        # it comes in the main thread, and plugins run in others.
        raise BoundaryError(owner, self.where, error) from error
