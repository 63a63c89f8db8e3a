"""The conformance checks of agents, parsers and rewards: good ones pass, and each kind of bad one is caught."""

import asyncio
import itertools
import json
import re

import numpy as np
import pytest
from attrs import define, evolve, field

from turnwise import Reply, Resources, State, ToolCall, TrajectoryScore, TurnScore
from turnwise.errors import EngineError, EpisodeEnd
from turnwise_testing import RewardSuite
from turnwise_testing.checks.agent import AGENT_CHECKS, run_agent_checks
from turnwise_testing.checks.parser import PARSER_CHECKS, ParserProbe, run_parser_checks
from turnwise_testing.checks.reward import REWARD_CHECKS, RewardExample, RewardProbe, run_reward_checks
from turnwise_testing.probes.agent import AgentProbe, ProbeParser, ReplayAgent, make_task, probe_chat, probe_resources
from turnwise_testing.suites.parser import ToolParserSuite

CHAT = probe_chat()


@define
class ToolLoop:
    """A small good agent: turns and tool calls until an answer. Subclasses break one promise each."""

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.memory["turns"] = 0
            episode.begin(CHAT.prompt(episode.messages))
            return State.GENERATING
        return await self.turn(episode)

    async def turn(self, episode):
        result = await episode.generate()
        episode.memory["turns"] += 1
        content, calls = ProbeParser(CHAT).parse(result.token_ids)
        episode.messages.append({"role": "assistant", "content": content})
        if not calls:
            return self.end(episode)
        results = [await episode.call_tool(call) for call in calls]
        if self.has_ended(results):
            return State.TERMINATED
        messages = [{"role": "tool", "content": result.text} for result in results]
        self.answer(episode, CHAT.delta(messages, int(episode.trajectory.input_ids[-1])))
        episode.messages.extend(messages)
        return State.GENERATING

    def has_ended(self, results):
        return any(result.ends_episode for result in results)

    def end(self, episode):
        return State.TERMINATED

    def answer(self, episode, token_ids):
        episode.observe(token_ids)


class Raises(ToolLoop):
    def end(self, episode):
        raise KeyError("mine")


class Invents(ToolLoop):
    def end(self, episode):
        episode.trajectory.add_action([1, 2], [-0.1, -0.1])
        return State.TERMINATED


class NeverBegins(ToolLoop):
    async def step(self, episode):
        return State.TERMINATED


class ObservesLast(ToolLoop):
    def end(self, episode):
        if episode.remaining_tokens > 3:
            episode.observe(np.array([5, 5, 5]))
        return State.TERMINATED


class GoesOn(ToolLoop):
    def has_ended(self, results):
        return False


class Overruns(ToolLoop):
    def answer(self, episode, token_ids):
        episode.trajectory.add_observation(token_ids)


class KeepsSets(ToolLoop):
    def end(self, episode):
        episode.memory["seen"] = {1, 2}
        return State.TERMINATED


class KeepsTuples(ToolLoop):
    def end(self, episode):
        episode.memory["seen"] = (1, 2)
        return State.TERMINATED


@define
class KeepsNotesOnItself(ToolLoop):
    turns: int = 0

    async def turn(self, episode):
        self.turns += 1
        episode.memory["seen"] = self.turns
        return await super().turn(episode)


@define
class MixesEpisodes(ToolLoop):
    messages: list = field(factory=list)

    async def turn(self, episode):
        self.messages = episode.messages
        await asyncio.sleep(0.001)
        self.messages.append({"role": "assistant", "content": "note"})
        return await super().turn(episode)


class HidesEngineErrors(ToolLoop):
    async def turn(self, episode):
        try:
            return await super().turn(episode)
        except Exception as error:
            if isinstance(error.__cause__, EngineError):
                return State.TERMINATED
            raise


class HidesSignals(ToolLoop):
    async def turn(self, episode):
        try:
            return await super().turn(episode)
        except EpisodeEnd:
            return State.TERMINATED


class HidesLongPrompts(ToolLoop):
    async def step(self, episode):
        try:
            return await super().step(episode)
        except ValueError:
            raise
        except Exception:
            if episode.state == State.PENDING:
                return State.TERMINATED
            raise


class TestAgentChecks:
    """Agents."""

    def test_a_good_agent_passes_all(self):
        """The smallest loop with tools, and one turn alone."""
        asyncio.run(run_agent_checks(AgentProbe(make_agent=ToolLoop)))
        asyncio.run(run_agent_checks(AgentProbe(make_agent=lambda: ReplayAgent(CHAT), turns=("One.", "Two."))))

    @pytest.mark.parametrize(
        ("make_agent", "check", "text"),
        [
            (Raises, "finishes", "the episode ended as failed: agent KeyError: 'mine'"),
            (Invents, "records_hold", "differ from the engine's"),
            (NeverBegins, "records_hold", "without a record: the agent never called begin"),
            (ObservesLast, "last_turn_is_the_models", "the record ends with an observation"),
            (GoesOn, "a_tool_can_end_the_episode", "requests to the engine, and those before the end by a tool"),
            (Overruns, "budget_is_kept", "response tokens with a budget of"),
            (KeepsSets, "memory_is_json", "memory is not JSON after state 'generating'"),
            (KeepsTuples, "memory_is_json", "memory changes in JSON after state 'generating'"),
            (KeepsNotesOnItself, "steps_need_only_the_record_and_memory", "memory of an episode resumed"),
            (KeepsNotesOnItself, "is_repeatable", "memory of the same task again"),
            (MixesEpisodes, "many_at_once_do_not_mix", "messages of an episode among others"),
            (HidesEngineErrors, "engine_failure_is_the_engines", "status when generate call 0 fails"),
            (HidesSignals, "abort_keeps_what_was_sampled", "status when aborted after"),
            (HidesSignals, "deadline_keeps_what_was_sampled", "status of a late episode"),
            (HidesLongPrompts, "long_prompt_is_the_datas", "status with a prompt that is too long"),
        ],
    )
    def test_a_bad_agent_is_caught(self, make_agent, check, text):
        """Each by the check that is about it, which says what the agent did."""
        with pytest.raises(AssertionError, match=re.escape(text)):
            asyncio.run(AGENT_CHECKS[check](AgentProbe(make_agent=make_agent)))

    def test_an_agent_that_hangs_is_caught(self):
        """No check waits for ever."""

        class Hangs(ToolLoop):
            async def turn(self, episode):
                await asyncio.sleep(60)

        with pytest.raises(AssertionError, match=r"takes more than 0.05 s"):
            asyncio.run(AGENT_CHECKS["finishes"](AgentProbe(make_agent=Hangs, timeout_s=0.05)))

    def test_the_probe_needs_a_chat_template(self):
        """Its text says so."""
        with pytest.raises(AssertionError, match="need a chat template"):
            asyncio.run(AGENT_CHECKS["finishes"](AgentProbe(make_agent=ToolLoop, resources=Resources())))

    def test_required_fixtures_say_what_to_give(self):
        """A suite without them fails with a text that names them."""
        for suite, name in ((ToolParserSuite, "write_call"), (ToolParserSuite, "malformed"), (RewardSuite, "examples")):
            with pytest.raises(NotImplementedError, match=f"override the fixture '{name}'"):
                getattr(suite, name).__wrapped__(suite())


def write_call(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def parser_probe(parser, **changes):
    malformed = ("<tool_call>{</tool_call>", "<tool_call>")
    return ParserProbe(**{"parser": parser, "chat": CHAT, "write_call": write_call, "malformed": malformed, **changes})


class Changed:
    """The probe's parser, with its answer changed by a function of (ids, content, calls)."""

    def __init__(self, change):
        self.change = change
        self.num_parsed = 0

    def parse(self, token_ids):
        self.num_parsed += 1
        content, calls = ProbeParser(CHAT).parse(token_ids)
        return self.change(self, token_ids, content, calls)


def by_tokens(_parser, ids, content, calls):
    tag = CHAT.tokenizer.encode("<tool_call>")[0]
    return (content, calls) if tag in ids.tolist() else (CHAT.text(ids), ())


def end_sensitive(_parser, ids, content, calls):
    return (content, calls if ids[-1] not in CHAT.stop_token_ids else ()) if len(ids) else (content, calls)


def overwrites(_parser, ids, content, calls):
    ids[:1] = 0
    return content, calls


def odd_arguments(_parser, _ids, content, calls):
    return content, tuple(evolve(call, arguments={"x": (1, 2)}) for call in calls)


def bottomless(_parser, _ids, content, calls):
    value: list = []
    for _ in range(100_000):
        value = [value]
    return content, tuple(evolve(call, arguments={"x": value}) for call in calls)


def cut_sensitive(_parser, ids, content, calls):
    return content, calls if len(ids) % 2 else tuple(evolve(call, name=f"{call.name}!") for call in calls)


def loses_escapes(_parser, _ids, content, calls):
    """Reads an escaped line break as two characters, as a parser with its own pattern may do."""
    plain = (
        {key: value.replace("\n", "n") if isinstance(value, str) else value for key, value in call.arguments.items()}
        for call in calls
    )
    return content, tuple(evolve(call, arguments=each) for call, each in zip(calls, plain, strict=True))


def completes_calls(_parser, _ids, content, calls):
    """Repairs a call that the end of the turn cuts."""
    return content, tuple(ToolCall(name="repaired", raw=call.raw) if call.error else call for call in calls)


def renames_sorted(_parser, _ids, content, calls):
    """Depends on the order of the arguments."""
    odd = (list(call.arguments) != sorted(call.arguments) or len(call.arguments) < 2 for call in calls)
    return content, tuple(
        call if keeps else evolve(call, arguments=dict.fromkeys(call.arguments, 0))
        for call, keeps in zip(calls, odd, strict=True)
    )


class TestParserChecks:
    """Tool parsers."""

    def test_a_good_parser_passes_all(self):
        """The probe's own; one that goes by tag tokens passes when it says so."""
        run_parser_checks(parser_probe(ProbeParser(CHAT)))
        run_parser_checks(parser_probe(Changed(by_tokens), tags_are_tokens=True))

    @pytest.mark.parametrize(
        ("change", "check", "text"),
        [
            (lambda p, i, c, calls: (c.strip(), calls), "plain_text_has_no_calls", "a text without calls: expected"),
            (lambda p, i, c, calls: (c, ()), "a_good_call_is_found", "errors of good calls"),
            (lambda p, i, c, calls: (c, calls[::-1]), "calls_keep_their_order", "calls: expected"),
            (lambda p, i, c, calls: ("", calls), "calls_keep_their_order", "words of the text around the calls"),
            (lambda p, i, c, calls: (c, list(calls)), "a_good_call_is_found", "the calls are a list, not a tuple"),
            (lambda p, i, c, calls: (None, calls), "a_good_call_is_found", "the content is a NoneType, not a string"),
            (lambda p, i, c, calls: (c, ("call",)), "a_good_call_is_found", "a call is a str, not a ToolCall"),
            (lambda p, i, c, calls: (c, (ToolCall(),)), "a_good_call_is_found", "without an error has the name ''"),
            (
                lambda p, i, c, calls: (c, tuple(call for call in calls if not call.error)),
                "malformed_is_a_value",
                "no call with an error in '<tool_call>{</tool_call>'",
            ),
            (lambda p, i, c, calls: (c, calls[: p.num_parsed]), "is_repeatable", "the same turns again"),
            (by_tokens, "splitting_changes_nothing", "each character by itself"),
            (loses_escapes, "random_conversations", "calls: expected"),
            (completes_calls, "a_turn_may_be_cut_at_every_character", "good calls in"),
            (renames_sorted, "calls_that_clients_send_back", "calls of an echo"),
            (end_sensitive, "end_of_turn_changes_nothing", "errors of good calls"),
            (overwrites, "a_good_call_is_found", "parse changed the ids"),
            (odd_arguments, "a_good_call_is_found", "arguments of a call change in JSON"),
            (bottomless, "a_good_call_is_found", "arguments of a call without an error are not JSON"),
            (cut_sensitive, "a_turn_may_be_cut_anywhere", "good calls in the first"),
        ],
    )
    def test_a_bad_parser_is_caught(self, change, check, text):
        """Each by the check that is about it, which says what the parser did."""
        with pytest.raises(AssertionError, match=re.escape(text)):
            PARSER_CHECKS[check](parser_probe(Changed(change)))

    def test_a_parser_that_raises_is_caught(self):
        """By its own exception."""

        def raises(_parser, ids, content, calls):
            return content, tuple(evolve(call, name=str(ids.tolist().index(ord("F")))) for call in calls)

        with pytest.raises(ValueError, match="is not in list"):
            PARSER_CHECKS["any_ids_have_an_answer"](parser_probe(Changed(raises)))

    def test_the_probe_needs_malformed_calls(self):
        """A check without anything to check is no pass."""
        with pytest.raises(AssertionError, match="give the probe texts of malformed calls"):
            PARSER_CHECKS["malformed_is_a_value"](parser_probe(ProbeParser(CHAT), malformed=()))


class ExactMatch:
    """A small good reward."""

    def score(self, episode):
        text = episode.messages[-1]["content"]
        return TrajectoryScore(value=float(text == episode.task.ground_truth))


class AsyncMatch(ExactMatch):
    """The same, as a coroutine."""

    async def score(self, episode):
        await asyncio.sleep(0)
        return super().score(episode)


class PerTurn:
    """One number a turn."""

    def score(self, episode):
        return TurnScore(values=(0.5,) * len(episode.trajectory.turns()))


class Forgets:
    """Looks at the episode of whoever came last."""

    async def score(self, episode):
        self.episode = episode
        await asyncio.sleep(0)
        return ExactMatch().score(self.episode)


class Counts:
    """Gives more each time."""

    counter = itertools.count()

    def score(self, episode):
        return TrajectoryScore(value=float(next(self.counter)))


class Scores:
    """A reward made of a function of the episode."""

    def __init__(self, function):
        self.score = function


EXAMPLES = (
    RewardExample(answer="42", ground_truth="42", expected=1.0),
    RewardExample(answer="Grüße", ground_truth="42", expected=0.0),
    RewardExample(answer="x", task=make_task(7)),
)


class TestRewardChecks:
    """Rewards."""

    @pytest.mark.parametrize("make_reward", [ExactMatch, AsyncMatch])
    def test_a_good_reward_passes_all(self, make_reward):
        """Sync and async."""
        asyncio.run(run_reward_checks(RewardProbe(make_reward=make_reward, examples=EXAMPLES)))

    def test_scores_of_other_shapes_pass(self):
        """One number a turn."""
        asyncio.run(run_reward_checks(RewardProbe(make_reward=PerTurn, examples=EXAMPLES[2:])))

    @pytest.mark.parametrize(
        ("make_reward", "check", "text"),
        [
            (lambda: Scores(lambda _e: "good"), "returns_a_score", "score returned 'good'"),
            (lambda: Scores(lambda _e: float("nan")), "returns_a_score", "score is not finite"),
            (lambda: Scores(lambda _e: TurnScore(values=(1.0, 2.0))), "returns_a_score", "2 turn scores for 1 turns"),
            (lambda: Scores(lambda _e: 0.5), "expected_values", "answer '42': expected 1.0, got 0.5"),
            (Counts, "is_repeatable", "scores of the same episodes again"),
            (Forgets, "many_at_once_do_not_mix", "scores of episodes at once"),
            (
                lambda: Scores(lambda e: e.messages[-1]["content"][0] and 0.0),
                "empty_response_has_a_score",
                "IndexError",
            ),
            (lambda: Scores(lambda e: float(e.messages[-1]["content"]) * 0), "cut_response_has_a_score", "ValueError"),
        ],
    )
    def test_a_bad_reward_is_caught(self, make_reward, check, text):
        """Each by the check that is about it, which says what the reward did."""
        with pytest.raises(AssertionError, match=re.escape(text)):
            asyncio.run(REWARD_CHECKS[check](RewardProbe(make_reward=make_reward, examples=EXAMPLES)))

    def test_the_probe_needs_examples(self):
        """A check without anything to check is no pass."""
        with pytest.raises(AssertionError, match="give the probe examples"):
            asyncio.run(REWARD_CHECKS["returns_a_score"](RewardProbe(make_reward=ExactMatch, examples=())))


def test_an_interaction_can_be_part_of_the_probe():
    """The driver of the probe offers what the resources hold."""

    class User:
        async def create(self, task): ...

        async def respond(self, session, messages):
            return Reply(should_terminate=True, reward=0.5)

        async def release(self, session): ...

    class Asks(ToolLoop):
        async def turn(self, episode):
            await episode.generate()
            episode.memory["reward"] = (await episode.interact()).reward
            return State.TERMINATED

    resources = evolve(probe_resources(), interaction=User())
    run = asyncio.run(AgentProbe(make_agent=Asks, resources=resources).run(make_task()))
    assert run.episode.memory == {"turns": 0, "reward": 0.5}
