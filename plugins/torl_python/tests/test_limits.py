"""Tests of `torl_python`'s budgets, construction and prompts."""

import asyncio

import pytest

from turnwise import Resources, State, Status
from turnwise.errors import ConfigError
from turnwise_testing.probes.agent import make_task, probe_chat
from turnwise_torl_python import make_torl_python
from turnwise_torl_python.config import TorlPythonConfig

CHAT = probe_chat()


def call(code):
    return f"Let us compute.\n```python\n{code}\n```\n```output"


def shown(run):
    return [message["content"] for message in run.result.messages if message["role"] == "tool"]


class TestLimits:
    """Budgets and construction."""

    def test_no_program_runs_without_room(self, converse):
        """A program has side effects, so it does not run when the budget has no room for its output."""
        text = call("1 + 1")
        done = converse(text, limits={"response_length": len(text)})
        assert done.result.status is Status.TRUNCATED
        assert done.result.metrics.num_tool_calls == 0
        assert done.result.messages[-1] == {"role": "assistant", "content": text}

    @pytest.mark.parametrize("spare", range(9))
    def test_a_program_runs_if_the_model_could_read_an_empty_output(self, spare, converse):
        """That is two line breaks, the fence with its line break, and one token of the model behind it."""
        text = call("1 + 1")
        done = converse(text, "ok", limits={"response_length": len(text) + spare})

        assert done.episode.memory["calls"] == (spare >= len("\n\n```\n") + 1)

    def test_an_output_that_does_not_fit_is_not_appended(self, converse):
        """The program ran, and the record ends with the model's turn."""
        text = call("print('a' * 100)")
        done = converse(text, limits={"response_length": len(text) + 30})
        assert done.result.status is Status.TRUNCATED
        assert (done.episode.memory["calls"], shown(done)) == (1, [])

    def test_the_tool_ends_the_episode(self, converse):
        """The record and the messages end with the model's turn."""
        done = converse(call("submit"), "More.")
        assert done.result.status is Status.COMPLETED
        assert (done.episode.memory["calls"], shown(done), done.result.metrics.num_turns) == (1, [], 1)

    @pytest.mark.parametrize("room", range(1, 12))
    def test_a_turn_beyond_the_budget_is_truncated(self, room, converse):
        """The messages have the text so far, also when the budget ends inside the stop string."""
        done = converse("`u`` ```output", limits={"response_length": room})
        assert done.result.status is Status.TRUNCATED
        assert done.result.messages[-1]["content"] == "`u`` ```output"[:room]

    def test_setup_errors(self):
        """The error names the missing resource, or the option out of range."""
        with pytest.raises(ConfigError, match="agent 'torl_python' needs a tokenizer"):
            make_torl_python(TorlPythonConfig(), Resources())
        with pytest.raises(ConfigError, match="runs code with the tool 'python': add it to tools"):
            make_torl_python(TorlPythonConfig(), Resources(chat=CHAT))
        for options in ({"max_tool_calls": -1}, {"max_output_chars": 1}, {"plain_prompt": "none"}, {"errors": "no"}):
            with pytest.raises(ValueError, match=next(iter(options))):
                TorlPythonConfig(**options)

    @pytest.mark.parametrize(
        "messages",
        [
            ({"role": "system", "content": "a"}, {"role": "user", "content": "b"}),
            ({"role": "assistant", "content": "a"},),
            ({"role": "user", "content": [{"type": "image"}]},),
            ({"role": "user", "content": None},),
        ],
    )
    def test_a_conversation_that_does_not_fit_the_plain_prompt_fails(self, messages, converse):
        """The episode fails with a fault of the data, and no message is dropped silently."""
        done = converse("x", task=make_task(messages=messages))
        assert (done.result.status, done.result.fault.owner) == (Status.FAILED, "data")

    def test_parts_of_text_are_joined(self, converse):
        """Text parts of a message form one question, as in the chat template."""
        parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]
        (trajectory,) = converse(
            "x", task=make_task(messages=({"role": "user", "content": parts},))
        ).result.trajectories
        assert "What now?" in CHAT.tokenizer.decode(trajectory.prompt_ids)

    def test_an_unknown_state(self, make_resources):
        """The error names the agent and the state."""
        agent = make_torl_python(TorlPythonConfig(), make_resources())

        class Odd:
            state = "odd"

        with pytest.raises(ValueError, match="torl_python has no state 'odd'"):
            asyncio.run(agent.step(Odd()))
        assert State.PENDING == "pending"
