"""Scores of turns: each lies on the last token of its turn, in any order of events."""

import asyncio
import random

import numpy as np
import pytest
from attrs import define, evolve, field
from hypothesis import example, given, settings
from hypothesis import strategies as st
from session_scenarios import Sessions, as_message, make_call, results_of, user

from turnwise.record.result import token_scores
from turnwise_gateway.agents.reported import note_score
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.control.agent_session import AgentSession
from turnwise_gateway.control.scores import ScoreReport, Verdict
from turnwise_gateway.session.session import Session
from turnwise_reported_reward.reward import ReportedReward
from turnwise_testing.engines.scripted import ScriptedEngine


class ShortEngine(ScriptedEngine):
    """Ends its first turn before the first token."""

    async def generate(self, request):
        result, size = await super().generate(request), 0 if self.is_first else 5
        self.is_first = False
        return evolve(result, token_ids=result.token_ids[:size], logprobs=result.logprobs[:size])

    is_first = True


ACTIONS = (
    "ask",
    "ask",
    "ask",
    "confirm",
    "confirm",
    "echo",
    "release",
    "key",
    "lose",
    "show",
    "score",
    "score",
    "fail",
)


@define(eq=False)
class Attempt:
    """A session of the episode, with the knowledge of its client and its scorer."""

    session: Session
    recorded: AgentSession
    conversations: list = field(factory=lambda: [[user("Question 0?")], [user("A sub-agent's question")]])
    pending: list = field(factory=list)
    read: dict = field(factory=dict)
    calls: dict = field(factory=dict)
    shown: dict = field(factory=dict)
    wanted: dict = field(factory=dict)


@define(eq=False)
class ScoringAgent:
    """
    Does random things in some conversations at once, and scores turns by their ids and by their shown numbers.

    Attributes:
        choices: source of its decisions.
        actions: names of its actions, in order.
        attempts: at the episode; the last one counts.
    """

    choices: random.Random
    actions: list
    attempts: list = field(factory=list)

    @property
    def now(self):
        return self.attempts[-1]

    async def run(self, session):
        self._open(session)
        for number, action in enumerate(self.actions):
            await getattr(self, f"_{action}")(number)
        for answer, _conversation in self.now.pending:
            answer.release()
        self.now.recorded.end()
        await session.settle()
        self.now.session.close()
        note_score(self.now.session, self.now.recorded.reported_score(), {})

    def _open(self, session):
        self.attempts.append(Attempt(session, AgentSession(session.name, session)))

    async def _answer(self, messages, **changes):
        call = make_call(*messages, **changes)
        try:
            return call, await self.now.session.answer(call)
        except CallRefusedError as refusal:
            assert "budget_exhausted" == refusal.kind  # noqa: PT017 - others are failures
            return call, None

    async def _ask(self, number):
        conversation = self.choices.choice(self.now.conversations)
        _call, answer = await self._answer(conversation)
        if answer is not None:
            self.now.pending.append((answer, conversation))

    def _take(self):
        return self.now.pending.pop(self.choices.randrange(len(self.now.pending))) if self.now.pending else (None, None)

    def _read(self, answer, conversation):
        """Note that the client has the answer, and return the conversation with it."""
        self.now.read[answer.reply.id] = answer.reply
        longer = [*conversation, as_message(answer.reply), *(results_of(answer.reply) or [user("Go on.")])]
        self.now.conversations.append(longer)
        return longer

    async def _confirm(self, number):
        answer, conversation = self._take()
        if answer is not None:
            answer.confirm()
            self._read(answer, conversation)

    async def _echo(self, number):
        """Send a turn back before the transport has said that it was delivered."""
        answer, conversation = self._take()
        if answer is None:
            return
        _call, next_answer = await self._answer(self._read(answer, conversation))
        self.now.pending.append((answer, conversation))
        if next_answer is not None:
            self.now.pending.append((next_answer, self.now.conversations[-1]))

    async def _release(self, number):
        answer, _conversation = self._take()
        if answer is not None:
            answer.release()

    async def _key(self, number):
        """Get one turn twice under the key of its request."""
        conversation = self.choices.choice(self.now.conversations)
        answers = [(await self._answer(conversation, key=f"key {number}"))[1] for _ in range(2)]
        if None in answers:
            return
        assert 1 == len({answer.reply.id for answer in answers})
        self._read(answers[0], conversation)
        for answer in answers:
            answer.confirm()

    async def _lose(self, number):
        """Lose a response whose bytes had left, and ask again."""
        conversation = self.choices.choice(self.now.conversations)
        call, answer = await self._answer([*conversation, user(f"Once {number}.")])
        if answer is None:
            return
        answer.confirm()
        answer.lose()
        again = await self.now.session.answer(call)
        assert answer.reply is again.reply
        again.confirm()
        self._read(again, list(call.messages))

    async def _show(self, number):
        """Read the numbers of the turns; each names the same turn as before."""
        for place, turn in enumerate(self.now.recorded.transcript):
            assert turn.reply.id == self.now.shown.setdefault(place, turn.reply.id)

    async def _score(self, number):
        await self._show(number)
        attempt = self.choices.choice(self.attempts)
        names = [*attempt.shown, *attempt.read, "session-999"]
        name = self.choices.choice(names)
        turn_id = attempt.recorded.find_turn(name)
        if name == "session-999":
            assert turn_id is None
            return
        assert turn_id == attempt.shown.get(name, name)
        report = ScoreReport(id=f"score {number}", score=float(number + 1), turn=turn_id)
        verdict = attempt.recorded.scores.report(report)
        if attempt is not self.now:
            assert Verdict.LATE is verdict
        elif turn_id in attempt.wanted:
            assert Verdict.CONFLICT is verdict
        else:
            assert Verdict.ACCEPTED is verdict
            attempt.wanted[turn_id] = report.score

    async def _fail(self, number):
        """Lose the lease; the next attempt has another session."""
        if len(self.attempts) == 3:
            return
        earlier = self.now
        await self._show(number)
        earlier.recorded.end()
        earlier.session.close()
        first = earlier.session
        self._open(Session(first.episode, first.parts, f"attempt-{len(self.attempts)}", first.spawn))


def wanted_scores(done, attempt):
    """Return the scores of the tokens of each record of the episode."""
    wanted = [np.zeros(record.num_response_tokens, np.float32) for record in done.records]
    places = {id(record): place for place, record in enumerate(done.run.episode.trajectories)}
    for turn in attempt.session.transcript:
        record = attempt.session.book.records[turn.reply.provenance["record"]].trajectory
        last = turn.reply.usage.prompt_tokens + len(turn.reply.token_ids) - 1 - record.num_prompt_tokens
        wanted[places[id(record)]][last] = attempt.wanted.get(turn.reply.id, 0.0)
    return wanted


# A sub-agent's turn is confirmed between the echo of the main turn and its confirmation.
ECHO_FIRST = ["ask", "ask", "echo", "confirm", "confirm", "confirm", "score", "score", "score"]
LOST_LEASE = ["ask", "confirm", "fail", "ask", "confirm", "score"]
TWO_ANSWERS = ["key", "ask", "confirm", "score", "score"]


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32), actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=24))
@example(seed=3, actions=ECHO_FIRST)
@example(seed=1, actions=LOST_LEASE)
@example(seed=2, actions=TWO_ANSWERS)
def test_each_score_lies_on_its_turn(seed, actions):
    """In any order of answers, echoes, lost responses, lost leases and scores, in conversations at once."""
    agent = ScoringAgent(random.Random(seed), actions)
    done = Sessions().run(agent.run)
    scores = ReportedReward().score(done.run.episode)

    assert bool(agent.now.wanted) == bool(scores)
    for score, record, wanted in zip(scores, done.records, wanted_scores(done, agent.now), strict=False):
        assert wanted.tolist() == token_scores(score, record).tolist()


def test_scores_of_records_follow_the_records_of_the_attempt():
    """Also if a call of an earlier attempt opens a record after the start of the next attempt."""

    async def two_attempts(session):
        later = Session(session.episode, session.parts, "later", session.spawn)
        for each, text in ((session, "One?"), (later, "Two?"), (session, "Three?"), (later, "Four?")):
            (await each.answer(make_call(user(text)))).confirm()
        later.close()
        note_score(later, {"records": [0.25, 0.5]}, {})

    done = Sessions().run(two_attempts)

    assert [0.0, 0.25, 0.0, 0.5] == [score.value for score in ReportedReward().score(done.run.episode)]


def test_a_turn_without_tokens_takes_no_score():
    """A turn that the engine ended before its first token has no place for a score, and moves no other score."""

    async def scenario(session):
        recorded = AgentSession("s", session)
        ids = []
        for text in ("One?", "Two?"):
            answer = await session.answer(make_call(user(text)))
            answer.confirm()
            ids.append(answer.reply.id)
        assert [None, ids[1]] == [recorded.find_turn(name) for name in ids]
        assert [False, True] == [recorded.has_record(number) for number in range(2)]
        recorded.scores.report(ScoreReport(id="a", score=1.0, turn=ids[1]))
        session.close()
        note_score(session, recorded.reported_score(), {})

    done = Sessions().run(scenario, engine=lambda probe: ShortEngine(probe.choose))

    assert [(), (1.0,)] == [score.values for score in ReportedReward().score(done.run.episode)]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_score_shows_that_its_turn_was_read(is_read):
    """A score delivers a turn that is on its way; a turn that its client left behind takes no score."""

    async def scenario(session):
        recorded = AgentSession("s", session)
        answer = await session.answer(make_call(user("Question 0?")))
        if not is_read:
            answer.release()
        found = recorded.find_turn(f"chatcmpl-{answer.reply.id}")
        assert (answer.reply.id if is_read else None) == found
        assert is_read == bool(recorded.transcript)
        answer.confirm()
        await asyncio.sleep(0)

    done = Sessions().run(scenario)

    assert [int(is_read)] == [len(record.turns()) for record in done.records]
