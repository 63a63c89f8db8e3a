"""Samples the turns of a session's records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, field

from turnwise import Episode, GenerateResult
from turnwise.errors import BudgetExhausted
from turnwise_gateway.calls import CallRefusedError, ModelCall, PartialReply
from turnwise_gateway.session.drafts import stream_reply
from turnwise_gateway.session.records import OpenRecord
from turnwise_gateway.session.replies import ReplyHead
from turnwise_gateway.session.seeds import TurnSeeds
from turnwise_gateway.session.turns import TurnReader


@define(eq=False)
class TurnSampler:
    """
    Samples turns from the engine of an episode.

    Attributes:
        episode: of the session.
        seed: of the run.
        reader: reads a turn while it is sampled, for streams.
        on_cut: called with the part of a turn that an engine returns when the sampling is cancelled.
    """

    episode: Episode
    seed: int
    reader: TurnReader
    on_cut: Callable[[GenerateResult], object]
    _seeds: TurnSeeds = field(factory=TurnSeeds, init=False)

    async def sample(
        self, call: ModelCall, record: OpenRecord, head: ReplyHead, partial_replies: Sequence[PartialReply]
    ) -> GenerateResult:
        """
        Return the next turn of a record, which does not have it yet; it keeps to the grammar, if there is one.

        Args:
            call: with the messages that the record has.
            record: to continue.
            head: of the reply.
            partial_replies: read the turn while it is sampled; none unless the call is a stream.

        Raises:
            CallRefusedError: not one token fits.
        """
        trajectory = record.trajectory
        if self.episode.remaining(trajectory) < 1:
            num_tokens = len(trajectory)
            text = f"the conversation has {num_tokens} tokens and fills the context"
            raise CallRefusedError("context_length_exceeded", text, num_tokens=num_tokens, max_tokens=num_tokens)
        try:
            return await self.episode.sample(
                self._seeds.sampling(record, self.episode, self.seed),
                record=trajectory,
                max_tokens=call.max_tokens,
                stop=call.stop,
                on_tokens=self._listener(call, head, partial_replies),
                on_cut=self.on_cut,
                grammar=call.grammar,
            )
        except BudgetExhausted as error:
            raise CallRefusedError("budget_exhausted", str(error)) from error

    def _listener(
        self, call: ModelCall, head: ReplyHead, partial_replies: Sequence[PartialReply]
    ) -> Callable[[Sequence[int]], None] | None:
        """Return the listener of the engine's request, for a stream that can be read while it is sampled."""
        if not partial_replies:
            return None
        draft = self.reader.draft(call, (*call.stop, *self.episode.sampling.stop))
        return None if draft is None else stream_reply(partial_replies, draft, head.name_call, head.part)
