"""
A worker's side of the reward workers: episodes that have ended go out as plain data, and scores come back.

It chooses the reward worker with the least to do, tries again elsewhere when one dies or its service fails, and knows
nothing of Ray.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from math import inf
from typing import Any, Literal

from attrs import define, evolve, field, frozen

from turnwise.driver import Recipe
from turnwise.errors import EngineError, InfrastructureError, TurnwiseError
from turnwise.protocols import Episode
from turnwise.runtime.ended_episode import EndedEpisode
from turnwise.runtime.supervision import reason_of
from turnwise.runtime.worker import WorkerParts


@frozen(kw_only=True)
class RewardFailure:
    """
    What a reward raised, as plain data: classes of errors need not exist in both processes, nor travel.

    Attributes:
        kind: name of the class.
        text: the error's own.
        frames: the traceback.
        of_whom: whose fault it is where the class says so.
    """

    kind: str
    text: str
    frames: str
    of_whom: Literal["reward", "engine", "infra"] = "reward"

    @classmethod
    def of(cls, error: BaseException) -> RewardFailure:
        """Take down an error."""
        of_whom: Literal["reward", "engine", "infra"] = "reward"
        if isinstance(error, EngineError):
            of_whom = "engine"
        elif isinstance(error, InfrastructureError):
            of_whom = "infra"
        frames = "".join(traceback.format_exception(error))
        return cls(kind=type(error).__name__, text=str(error), frames=frames, of_whom=of_whom)

    def as_error(self) -> Exception:
        """Return an error of that name and text, with the frames as a note."""
        bases = {"reward": TurnwiseError, "engine": EngineError, "infra": InfrastructureError}
        error: Exception = type(self.kind, (bases[self.of_whom],), {})(self.text)
        error.add_note(f"in a reward worker:\n{self.frames}")
        return error


@frozen(kw_only=True)
class RewardAnswer:
    """
    What a reward worker sends back.

    Attributes:
        scores: what the reward returned, as it was.
        recorded: metrics that it added.
        failure: what it raised instead.
    """

    scores: Any = None
    recorded: tuple[tuple[str, float], ...] = ()
    failure: RewardFailure | None = None


Ask = Callable[[EndedEpisode, float], Awaitable[RewardAnswer]]
"""Has one reward worker score an episode within seconds; raises when the worker dies."""


class RewardWorkerDiedError(InfrastructureError):
    """The process that scored is gone; this episode, or one beside it, may be why."""


@define(eq=False)
class _Link:
    """
    One reward worker.

    Attributes:
        ask: has it score.
        num_waiting: scores that were asked for and have not come.
        alone: held by an episode whose last reward worker died: of these it gets one at a time, so that one that kills
            takes no others with it again and again.
    """

    ask: Ask
    num_waiting: int = 0
    alone: asyncio.Lock = field(factory=asyncio.Lock)


@define(eq=False)
class RewardPool:
    """
    The reward workers as a worker sees them.

    Attributes:
        max_tries: how often one episode is tried to be scored, when reward workers die or their services fail.
        backoff_s: seconds before a second try after a service failed; doubles each time.
        reward_s: seconds that one score may take, from when a reward worker begins with it.
        num_retried: scores that were asked for again.
    """

    max_tries: int = 3
    backoff_s: float = 0.5
    reward_s: float = field(default=60.0, init=False)
    num_retried: int = field(default=0, init=False)
    _links: dict[int, _Link] = field(factory=dict, init=False)
    _any_up: asyncio.Event = field(factory=asyncio.Event, init=False)
    _given_up: str = field(default="", init=False)

    def serve(self, parts: WorkerParts) -> WorkerParts:
        """Return a worker's parts with every reward asked here; the deadline is then kept where the reward runs."""
        self.reward_s = parts.limits.reward_s
        recipes = {name: self._recipe(recipe) for name, recipe in parts.recipes.items()}
        return evolve(parts, recipes=recipes, limits=evolve(parts.limits, reward_s=inf))

    def _recipe(self, recipe: Recipe) -> Recipe:
        return recipe if recipe.reward is None else evolve(recipe, reward=self)

    async def score(self, episode: Episode) -> Any:
        """
        Have an episode scored; whatever the reward raised is raised here.

        Raises:
            InfrastructureError: every try ended with a dead reward worker or a failed service, or none is left.
        """
        ended, suspect = EndedEpisode.of(episode), False
        for attempt in range(1, self.max_tries + 1):
            try:
                answer = await self._ask(ended, suspect=suspect)
                break
            except InfrastructureError as error:
                suspect = suspect or isinstance(error, RewardWorkerDiedError)
                if attempt == self.max_tries or self._given_up:
                    raise
                self.num_retried += 1
                await asyncio.sleep(self.backoff_s * 2.0 ** (attempt - 1))
        for name, value in answer.recorded:
            episode.record_metric(name, value)
        if answer.failure is not None:
            raise answer.failure.as_error()
        return answer.scores

    # What the runtime tells

    def up(self, index: int, ask: Ask) -> None:
        """Use a reward worker, new or restarted."""
        self._links[index] = _Link(ask)
        self._any_up.set()

    def down(self, index: int) -> None:
        """Stop using a reward worker."""
        self._links.pop(index, None)
        if not self._links and not self._given_up:
            self._any_up.clear()

    def give_up(self, reason: str) -> None:
        """Wait for no reward worker any more."""
        self._given_up = reason
        self._any_up.set()

    async def _ask(self, ended: EndedEpisode, *, suspect: bool) -> RewardAnswer:
        while True:
            await self._any_up.wait()
            if not self._links:
                raise InfrastructureError(f"every reward worker is dead, the last: {self._given_up}")
            index, link = min(self._links.items(), key=lambda pair: (pair[1].num_waiting, pair[0]))
            async with link.alone if suspect else nullcontext():
                if self._links.get(index) is link:
                    return await self._ask_link(index, link, ended)

    async def _ask_link(self, index: int, link: _Link, ended: EndedEpisode) -> RewardAnswer:
        answering = link.ask(ended, self.reward_s)  # what cannot travel raises here, and is the episode's own
        link.num_waiting += 1
        try:
            answer = await answering
        except Exception as error:
            if self._links.get(index) is link:
                self.down(index)
            raise RewardWorkerDiedError(f"reward worker {index} died: {reason_of(error)}") from error
        finally:
            link.num_waiting -= 1
        if answer.failure is not None and answer.failure.of_whom == "infra":
            raise answer.failure.as_error()
        return answer
