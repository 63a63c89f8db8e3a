"""A judge in one process: its own template and sampling, and equal answers to equal questions."""

import asyncio
import sys

import numpy as np
import pytest
import yaml

from turnwise import Judge, RolloutManager, SamplingParams
from turnwise.config.resolve import load_resolved
from turnwise.errors import ConfigError, EngineError, InfrastructureError, ReplicaDiedError
from turnwise.runtime.judge import JudgeClient
from turnwise_task_files import load_tasks
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.probes.agent import probe_chat
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, write_scripted_run

END = 258
QUESTION = [{"role": "user", "content": "Is 4 right?"}]


def ask(call, **options):
    """Call a judge over a scripted engine; return the result and the requests of the engine."""

    async def go():
        engine = ScriptedEngine(policy=RandomPolicy(seed=2, vocab_size=120, end_token_id=END, mean_tokens=9))
        await engine.start()
        judge = JudgeClient(engine=engine, **{"chat": probe_chat(), **options})
        assert isinstance(judge, Judge)
        return await call(judge), engine.requests

    return asyncio.run(go())


def test_asking_uses_the_judges_own_template_and_end_of_turn():
    """
    The question is rendered as a prompt of the judge, and its answer comes back as text without the end token.
    """
    answer, (request,) = ask(lambda judge: judge.ask(QUESTION))
    chat = probe_chat()

    assert chat.prompt(QUESTION).tolist() == request.token_ids.tolist()
    assert set(chat.stop_token_ids) <= set(request.sampling.stop_token_ids)
    assert (0.0, 1024) == (request.sampling.temperature, request.sampling.max_tokens)
    assert answer
    assert "im_end" not in answer


def test_equal_questions_have_equal_seeds():
    """Seeds depend on the run's seed and the question; a given seed is kept."""

    def two(judge):
        async def go():
            ids = np.arange(5, dtype=np.int32)
            for asked in (ids, ids, ids + 1):
                await judge.generate(asked)
            await judge.generate(ids, SamplingParams(seed=7, max_tokens=3))

        return go()

    _, requests = ask(two, seed=1)
    _, others = ask(two, seed=2)
    seeds = [request.sampling.seed for request in requests]

    assert seeds[0] == seeds[1] != seeds[2]
    assert 7 == seeds[3]
    assert seeds[0] != others[0].sampling.seed


def test_every_request_is_released_also_when_it_fails():
    """A replica keeps no context of a finished request."""
    released = []

    class Failing(ScriptedEngine):
        async def generate(self, request):
            raise ReplicaDiedError("all 2 replicas are dead")

    async def go():
        with pytest.raises(InfrastructureError, match=r"^judge: all 2 replicas are dead"):
            await JudgeClient(engine=Failing(), release=released.append).generate(np.array([1], np.int32))

    asyncio.run(go())
    assert 1 == len(released)


def test_a_judge_that_cannot_answer_says_why():
    """`ask` needs a template, and a process without replicas of the judge rejects requests."""

    async def go():
        with pytest.raises(ConfigError, match=r"judge\.model\.path"):
            await JudgeClient(engine=None).ask(QUESTION)
        with pytest.raises(EngineError, match="only workers and reward workers ask it"):
            await JudgeClient(engine=None).generate(np.array([1], np.int32))

    asyncio.run(go())


REWARD = """
import turnwise
from turnwise.errors import ConfigError


class Judged:
    def __init__(self, config, resources):
        if resources.judge is None:
            raise ConfigError("reward judged: set judge in the config")
        self.judge = resources.judge

    async def score(self, episode):
        said = await self.judge.ask(episode.messages)
        ids = episode.trajectory.input_ids
        return float(len(said)) + float((await self.judge.generate(ids)).token_ids.sum() % 7)


@turnwise.hookimpl
def register_rewards(registry):
    registry.add("judged", Judged)
"""


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """A run whose reward asks a judge with a separate model."""
    install_plugin(tmp_path / SITE, "acme_judge", REWARD)
    monkeypatch.syspath_prepend(str(tmp_path / SITE))
    monkeypatch.delitem(sys.modules, "acme_judge", raising=False)
    byte_tokenizer().save_pretrained(tmp_path / "judge")
    return write_scripted_run(
        tmp_path,
        num_tasks=4,
        reward="judged",
        judge={"engine": {"name": "scripted", "seed": 9}, "model": {"path": "judge"}},
        rollout={"prompt_length": 64, "response_length": 64},
        plugins=[PLUGIN, "acme_judge"],
    )


def rewards(config_file, *overrides):
    config, host = load_resolved(str(config_file), overrides)
    with RolloutManager.from_config(config, host) as manager:
        return [result.reward for result in manager.rollout(load_tasks(config))]


def test_a_reward_asks_the_judge_in_the_local_runtime(config_file):
    """
    The judge's engine starts and stops with the run, and equal runs have equal scores.
    """
    first = rewards(config_file)

    assert first == rewards(config_file, "runtime.num_workers=3")
    assert 1 < len(set(first))
    assert first != rewards(config_file, "judge.engine.seed=10")


def test_without_a_judge_the_reward_gets_none(config_file):
    """`Resources.judge` is None, and a reward that needs a judge rejects it."""
    text = yaml.safe_load(config_file.read_text())
    del text["judge"]
    config_file.write_text(yaml.safe_dump(text))

    with pytest.raises(ConfigError, match="reward judged: set judge in the config"):
        rewards(config_file)


def test_errors_of_a_judge_name_the_key(config_file):
    """Errors name the key in the section `judge`."""
    with pytest.raises(ConfigError, match=r"judge\.engine.*sead"):
        rewards(config_file, "judge.engine.sead=1")
    with pytest.raises(ConfigError, match=r"judge\.pool\.num_replicas"):
        rewards(config_file, "judge.pool.num_replicas=2")
