"""The records behind an agent loop of verl: they hold what was sampled, and an output cannot train anything else."""

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import SamplingParams, State, Status
from turnwise.errors import ConfigError
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine
from turnwise_testing.probes.agent import AgentProbe, probe_resources
from turnwise_verl_bridge.agent_loops.records import LoopOutput, LoopRecords
from turnwise_verl_bridge.agent_loops.server import EpisodeServer, read_sampling

PROMPT = [5, 6, 7]
STEPS = ("turn", "observe", "retry", "first of two", "drop", "both at once")


class Loop:
    """A loop that takes steps in the way of verl's: ids and masks are lists that it extends itself."""

    def __init__(self, steps, seed=0, tamper=None):
        self.steps, self.random, self.tamper = steps, random.Random(seed), tamper
        self.output = None

    async def run(self, server):
        """Return prompt ids, response ids, mask and log-probabilities."""
        ids, mask, logprobs = list(PROMPT), [], []

        async def sample():
            return await server.generate("x", prompt_ids=list(ids), sampling_params={"max_tokens": 4})

        def take(output):
            ids.extend(output.token_ids)
            mask.extend([1] * len(output.token_ids))
            logprobs.extend(output.log_probs)

        for step in self.steps:
            if step == "observe":
                observed = [self.random.randrange(200) for _ in range(self.random.randrange(1, 4))]
                ids.extend(observed)
                mask.extend([0] * len(observed))
                logprobs.extend([0.0] * len(observed))
            elif step == "both at once":
                async with asyncio.TaskGroup() as group:
                    both = [group.create_task(sample()) for _ in range(2)]
                take(both[self.random.randrange(2)].result())
            else:
                first = await sample()
                second = await sample() if step in ("retry", "first of two") else first
                if step != "drop":
                    take(first if step == "first of two" else second)
        return ids[: len(PROMPT)], ids[len(PROMPT) :], mask, logprobs


class LoopAgent:
    """Runs a loop over the records of an episode, as the agent `verl` does."""

    resumable = False

    def __init__(self, loop):
        self.loop = loop

    async def step(self, episode):
        records = LoopRecords(episode)
        prompt, response, mask, logprobs = await self.loop.run(EpisodeServer(records, SimpleNamespace))
        self.loop.output = (prompt, response, mask, logprobs)
        changed = self.loop.tamper(prompt, response, mask) if self.loop.tamper else (prompt, response, mask)
        records.finish([LoopOutput(*changed)])
        return State.TERMINATED


def play(loop, **limits):
    """Run a loop; return the episode's result."""
    resources = probe_resources()
    probe = AgentProbe(make_agent=lambda: LoopAgent(loop), resources=resources)

    async def run():
        engine = ScriptedEngine(policy=RandomPolicy(vocab_size=120, mean_tokens=3, end_token_id=258))
        await engine.start()
        limits_ = probe.limits(response_length=1000, **limits)
        return (await probe.run(probe.tasks[0], engine=engine, limits=limits_)).result

    return asyncio.run(run())


def trained_of(result):
    """Return the (place, id, log-probability) of all trained tokens of an episode, in order."""
    trained = result.trained or [True] * len(result.trajectories)
    found = []
    for record, is_trained in zip(result.trajectories, trained, strict=True):
        where = np.flatnonzero(record.response_mask) if is_trained else []
        found += [(int(i), int(record.response_ids[i]), float(record.logprobs[i])) for i in where]
    return sorted(found)


@given(steps=st.lists(st.sampled_from(STEPS), max_size=6), seed=st.integers(0, 99))
def test_what_a_loop_trains_is_what_was_sampled(steps, seed):
    """Whatever turns a loop drops, repeats or chooses from: its own lists and the records train the same tokens."""
    loop = Loop(["turn", *steps], seed)

    result = play(loop)

    assert result.status in (Status.COMPLETED, Status.TRUNCATED), result.fault
    _, response, mask, logprobs = loop.output
    expected = [(i, response[i], np.float32(logprobs[i])) for i in range(len(mask)) if mask[i]]
    assert trained_of(result) == expected


def test_a_loop_of_retries_has_one_record():
    """Turns that a loop samples again, or drops, cost no record."""
    result = play(Loop(["turn", "observe", "retry", "observe", "first of two", "drop", "observe"]))

    assert len(result.trajectories) == 1


@given(
    steps=st.lists(st.sampled_from(("turn", "observe", "retry")), min_size=2, max_size=5),
    seed=st.integers(0, 99),
    place=st.integers(0, 10_000),
)
def test_a_wrong_mask_is_an_error_with_its_place(steps, seed, place):
    """A mask that is flipped anywhere fails the episode; the text names the place."""
    flipped = []

    def flip(prompt, response, mask):
        index = place % len(mask)
        flipped.append(index)
        return prompt, response, [value ^ (number == index) for number, value in enumerate(mask)]

    # With one sampled token in all, no token would be left to train, which is no error.
    result = play(Loop(["turn", "observe", "turn", *steps], seed, flip))

    if result.status is Status.FAILED:
        assert f"response_mask[{flipped[0]}]" in result.fault.message
    else:
        assert trained_of(result) == []


@given(seed=st.integers(0, 99), place=st.integers(0, 10_000), wrong=st.integers(121, 199))
def test_another_token_is_an_error_with_its_place(seed, place, wrong):
    """An id that the loop changed, sampled or read, fails the episode; the text names the place."""
    changed = []

    def change(prompt, response, mask):
        # The tokens behind the last turn are the loop's alone.
        last = max(index for index, value in enumerate(mask) if value)
        index = place % (last + 1)
        changed.append((index, response[index]))
        return prompt, [wrong if number == index else id_ for number, id_ in enumerate(response)], mask

    result = play(Loop(["turn", "observe", "turn", "observe", "turn", "observe"], seed, change))

    (index, before) = changed[0]
    if before == wrong:
        assert result.status is not Status.FAILED
    else:
        assert f"response_ids[{index}] is {wrong}" in result.fault.message


@pytest.mark.parametrize(
    ("tamper", "text"),
    [
        pytest.param(lambda p, r, m: (p, r, m[:-1]), "response_mask has", id="short mask"),
        pytest.param(lambda p, r, m: (p, r, [2, *m[1:]]), "response_mask[0] is 2, expected 0 or 1", id="mask of 2"),
        pytest.param(lambda p, r, m: ([*p[:-1], 99], r, m), "prompt_ids[2] is 99, but the model read", id="prompt"),
        pytest.param(lambda p, r, m: (p, [*r, 1], [*m, 1]), "is 1, but the engine did not sample", id="more tokens"),
        pytest.param(lambda p, r, m: (p, r[1:], m[1:]), "response_ids[0]", id="first token missing"),
        pytest.param(lambda p, r, m: (p, r[:2], m[:2]), "response_mask[2] is not 1", id="last tokens missing"),
    ],
)
def test_an_output_that_does_not_fit_is_one_line(tamper, text):
    """The error of an output names the list, the place and the values."""
    result = play(Loop(["turn", "observe", "turn", "turn"], 3, tamper))

    assert result.status is Status.FAILED
    assert text in result.fault.message
    assert result.fault.owner == "agent"


def test_an_output_without_trained_tokens_is_not_trained():
    """A mask of zeros takes the episode out of the training, and is no error."""
    result = play(Loop(["turn", "observe"], tamper=lambda p, r, m: (p, r, [0] * len(m))))

    assert result.status is not Status.FAILED
    assert list(result.trained) == [False]


def test_another_conversation_has_a_record_of_its_own():
    """A loop that asks a second conversation, and returns both, trains both."""

    class Two(Loop):
        async def run(self, server):
            outputs = []
            for prompt in ([1, 2, 3], [1, 9]):
                output = await server.generate("x", prompt_ids=prompt, sampling_params={"max_tokens": 4})
                outputs.append(LoopOutput(prompt, output.token_ids, [1] * len(output.token_ids)))
            return outputs

    class Agent(LoopAgent):
        async def step(self, episode):
            records = LoopRecords(episode)
            outputs = await self.loop.run(EpisodeServer(records, SimpleNamespace))
            records.finish(outputs)
            self.loop.output = outputs
            return State.TERMINATED

    loop = Two([])
    probe = AgentProbe(make_agent=lambda: Agent(loop), resources=probe_resources())

    result = asyncio.run(probe.run(probe.tasks[0])).result

    assert [each.prompt_ids.tolist() for each in result.trajectories] == [[1, 2, 3], [1, 9]]
    assert [each.response_ids.tolist() for each in result.trajectories] == [each.response_ids for each in loop.output]
    assert [each.response_mask.min() for each in result.trajectories] == [1, 1]


def test_a_loop_that_never_asked_is_an_error():
    """An output without a request has nothing that was sampled."""

    class Liar(Loop):
        async def run(self, server):
            return [1], [2], [1], [0.0]

    assert "sent no request to its server_manager" in play(Liar([])).fault.message


def test_a_loop_without_room_is_truncated():
    """A context without room for a token ends the episode; the earlier turns are kept."""
    result = play(Loop(["turn", "observe"] * 40), max_sampled_tokens=10)

    assert result.status is Status.TRUNCATED


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 5}, {"temperature": 0.5, "top_p": 0.9, "top_k": 5}),
        ({"temperature": 0, "top_p": 0.9}, {"temperature": 0, "top_p": 1.0, "top_k": -1}),
        ({"max_new_tokens": 7, "logprobs": True, "repetition_penalty": 1.0, "n": 1}, {"max_tokens": 7}),
        ({"stop_token_ids": [4, 2]}, {"stop_token_ids": (2, 4)}),
        ({"seed": 11, "max_tokens": None}, {"seed": 11}),
    ],
)
def test_sampling_parameters_are_read(given, expected):
    """verl's names become ours; a parameter that is not given is the run's."""
    run = SamplingParams(temperature=0.7, stop_token_ids=(2,))

    found, stop = read_sampling(run, given)

    assert (found, stop) == (run.with_(**expected), ())


def test_stop_strings_are_read():
    """A stop string, or several."""
    assert [read_sampling(SamplingParams(), {"stop": stop})[1] for stop in ("a", ["a", "b"], None)] == [
        ("a",),
        ("a", "b"),
        (),
    ]


def test_other_parameters_are_options_of_the_engine():
    """Nothing that a loop asks for is dropped in silence: the engine knows the option or refuses it."""
    run = SamplingParams(extra={"min_p": 0.1, "repetition_penalty": 1.1})

    found, _ = read_sampling(run, {"beam_width": 3, "repetition_penalty": 1.0, "min_p": 0.2})

    assert found.extra == {"beam_width": 3, "min_p": 0.2}


def test_an_option_that_the_engine_does_not_know_fails_the_episode():
    """The error names the option."""

    class Asking(Loop):
        async def run(self, server):
            return await server.generate("x", prompt_ids=[1], sampling_params={"min_p": 0.2})

    assert "sampling.extra.min_p: the engine does not know this option" in play(Asking([])).fault.message


@pytest.mark.parametrize("name", ["image_data", "video_data", "audio_data"])
def test_images_are_refused(name):
    """No engine takes images, so a loop that sends some must not run without them."""
    server = EpisodeServer(None, SimpleNamespace)

    with pytest.raises(ConfigError, match=f"{name} is set"):
        asyncio.run(server.generate("x", prompt_ids=[1], sampling_params={}, **{name: ["image"]}))
