"""Tests of `single_turn` beyond the conformance suite: the record, the prompt and the options."""

import asyncio

import pytest

from turnwise import Resources, Status
from turnwise.errors import ConfigError
from turnwise_single_turn import make_single_turn
from turnwise_single_turn.config import SingleTurnConfig
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources


def run(task=None, **options):
    """Run one episode whose model writes a tool call, which the agent treats as text."""
    resources = probe_resources()
    probe = AgentProbe(
        make_agent=lambda: make_single_turn(SingleTurnConfig(**options), resources),
        turns=("<tool_call>{}</tool_call>",),
    )
    return asyncio.run(probe.run(task or make_task())), probe


def test_an_episode_is_one_prompt_and_one_turn():
    """The record has the prompt, without tools, and one action. The conversation ends with the model's text."""
    done, probe = run()
    assert done.result.status is Status.COMPLETED
    (trajectory,) = done.result.trajectories
    assert probe.chat.tokenizer.decode(trajectory.prompt_ids) == (
        "<|im_start|>user\nQuestion 0?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trajectory.response_ids.tolist() == probe.turn_ids[0]
    assert done.result.messages == (
        {"role": "user", "content": "Question 0?"},
        {"role": "assistant", "content": "<tool_call>{}</tool_call>"},
    )


def test_a_system_prompt_comes_first():
    """The config's prompt is inserted, and a system message of the task has priority."""
    done, _probe = run(system_prompt="Be brief.")
    assert done.result.messages[0] == {"role": "system", "content": "Be brief."}
    own = ({"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"})
    done, _probe = run(make_task(messages=own), system_prompt="Be brief.")
    assert done.result.messages[:2] == own


def test_the_turn_may_be_bounded():
    """A turn that reaches `max_tokens` ends the episode as truncated."""
    done, _probe = run(max_tokens=3)
    assert done.result.status is Status.TRUNCATED
    assert done.result.trajectories[0].num_response_tokens == 3


def test_a_bad_config_is_refused():
    """The error names the missing chat template, or the option out of range."""
    with pytest.raises(ConfigError, match="agent 'single_turn' writes prompts"):
        make_single_turn(SingleTurnConfig(), Resources())
    with pytest.raises(ValueError, match="max_tokens"):
        SingleTurnConfig(max_tokens=0)
