"""Tests of `tool_agent` beyond the conformance suite: calls, limits, truncation, and the simulated user."""

import asyncio
import re
from contextlib import nullcontext

import pytest
from attrs import evolve
from conversations import User, add, call, converse, tool_texts
from hypothesis import given
from hypothesis import strategies as st

from turnwise import Reply, Resources, State, Status, ToolResult
from turnwise.errors import ConfigError, InfrastructureError
from turnwise.record.columns import Origin
from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources
from turnwise_tool_agent import make_tool_agent
from turnwise_tool_agent.config import ToolAgentConfig
from turnwise_tool_agent.truncation import MARK, truncate


def test_a_conversation_with_a_tool():
    """Two turns with a call between them leave the expected record, messages, memory and metrics."""
    done = converse("Let me add. " + call(a=2, b=3), "It is 5.")
    assert done.result.status is Status.COMPLETED
    assert done.result.messages == (
        {"role": "user", "content": "Question 0?"},
        {
            "role": "assistant",
            "content": "Let me add. ",
            "tool_calls": [
                {
                    "id": "call00100",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call00100", "name": "add", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    )
    (trajectory,) = done.result.trajectories
    assert [segment.origin for segment in trajectory.segments] == [Origin.ACTION, Origin.OBSERVATION, Origin.ACTION]
    assert done.episode.memory == {
        "assistant_turns": 2,
        "user_turns": 1,
        "tool_rewards": [],
        "turn_rewards": [],
        "calls": [],
        "ended_by": "answer",
    }
    metrics = done.result.metrics
    assert (metrics.num_turns, metrics.num_tool_calls, metrics.num_tool_errors) == (2, 1, 0)


def test_the_record_reads_as_the_template_renders():
    """The appended tokens decode to the text that the template renders for the whole conversation."""
    done = converse(call(a=2, b=3), "It is 5.")
    resources = probe_resources()
    text = resources.chat.tokenizer.decode(done.result.trajectories[0].input_ids)
    assert text.endswith(
        f"<|im_start|>assistant\n{call(a=2, b=3)}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 5.<|im_end|>"
    )
    assert '"name": "add", "description": "Add two numbers."' in text


class TestCalls:
    """Calls of one turn."""

    def test_calls_of_one_turn_run_concurrently_and_keep_their_order(self):
        """Responses are in the order of the calls, whichever call finishes first."""
        running, most = set(), []

        async def slow(n: int) -> int:
            running.add(n)
            await asyncio.sleep(0.03 / n)
            most.append(len(running))
            running.remove(n)
            return n

        calls = "".join(call("slow", n=n) for n in (1, 2, 3))
        done = converse(calls, "ok", tools=(slow,), max_parallel_calls=3)
        assert tool_texts(done) == ["1", "2", "3"]
        assert max(most) == 3

    def test_calls_beyond_the_limit_return_an_error(self):
        """Each has a response, and the tool does not run for it."""
        seen = []

        def note(n: int) -> str:
            seen.append(n)
            return f"noted {n}"

        calls = "".join(call("note", n=n) for n in range(4))
        done = converse(calls, "ok", tools=(note,), max_parallel_calls=2)
        text = "Error: this call was not run: at most 2 of one turn are. Call again in a later turn."
        assert tool_texts(done) == ["noted 0", "noted 1", text, text]
        assert sorted(seen) == [0, 1]
        metrics = done.result.metrics
        assert (metrics.num_tool_calls, metrics.num_tool_errors) == (4, 2)
        tokens = metrics.num_tokens["observation"]
        assert metrics.extra == {"max_parallel_calls_hit": 1, "tool_output_tokens": tokens}

    def test_many_calls_have_one_response_for_the_rest(self):
        """A turn of hundreds of calls gets 32 messages."""
        done = converse(call(a=1, b=1) * 500, "ok", limits={"response_length": 50_000})
        texts = tool_texts(done)
        assert len(texts) == 32
        assert texts[0] == "2"
        assert texts[-1].startswith("Error: this call and all after it were not run: at most 1")
        assert done.result.metrics.num_tool_calls == 500
        assert done.result.status is Status.COMPLETED

    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("<tool_call>{</tool_call>", "Error: malformed call: JSONDecodeError"),
            ("<tool_call>", "Error: malformed call: JSONDecodeError"),
            (call("sub", a=1), "Error: there is no tool 'sub'; the tools are: add"),
            (call(a=1), "Error: the arguments of 'add' do not fit: \"b\" is a required property"),
            (call("fail"), "Error: ValueError: broken"),
        ],
    )
    def test_the_model_reads_errors_and_continues(self, text, answer):
        """A malformed call, an unknown tool, wrong arguments and a failing tool each return their error."""

        def fail() -> str:
            raise ValueError("broken")

        tools = (add, fail) if "fail" in text else (add,)
        done = converse(text, "ok", tools=tools)
        assert tool_texts(done) == [answer]
        assert done.result.status is Status.COMPLETED
        assert done.result.metrics.num_tool_errors == 1

    def test_a_malformed_call_keeps_its_text(self):
        """The message has the sampled text as the arguments of the call."""
        done = converse('<tool_call>{"name": </tool_call>', "ok")
        (made,) = done.result.messages[1]["tool_calls"]
        assert made["function"] == {"name": "", "arguments": '{"name": '}

    def test_malformed_calls_beyond_the_limit_keep_their_own_error(self):
        """The parser's error has priority over the limit's, because it tells the model more."""
        done = converse(call(a=1, b=1) + "<tool_call>{</tool_call>", "ok")
        assert tool_texts(done) == ["2", "Error: malformed call: JSONDecodeError"]

    def test_rewards_of_calls_are_kept(self):
        """The memory lists them, and the metrics have their sum."""

        def earn(x: float) -> ToolResult:
            return ToolResult(text="paid", reward=x)

        calls = call("earn", x=0.5) + call("earn", x=0.25) + call(a=1, b=1)
        done = converse(calls, "ok", tools=(earn, add), max_parallel_calls=3)
        assert done.episode.memory["tool_rewards"] == [0.5, 0.25]
        assert done.result.metrics.tool_reward == 0.75

    def test_an_infrastructure_failure_fails_the_episode(self):
        """The model gets no response, and concurrent calls are cancelled."""

        async def down() -> str:
            raise InfrastructureError("no sandbox")

        async def hang() -> str:
            await asyncio.sleep(60)
            return ""

        done = converse(call("hang") + call("down"), tools=(down, hang), max_parallel_calls=2)
        assert done.result.status is Status.FAILED
        assert (done.result.fault.owner, done.result.fault.message) == ("infra", "no sandbox")
        assert tool_texts(done) == []
        assert done.result.trajectories[0].num_response_tokens > 0


class TestLimits:
    """The model has the last turn."""

    def test_no_tool_runs_when_no_turn_is_left(self):
        """The call has no response once `max_assistant_turns` or `max_user_turns` is reached."""
        for options, why, num_turns in (
            ({"max_assistant_turns": 1}, "max_assistant_turns", 1),
            ({"max_assistant_turns": 2}, "max_assistant_turns", 2),
            ({"max_user_turns": 1}, "max_user_turns", 2),
        ):
            done = converse(*[call(a=1, b=1)] * 3, **options)
            assert done.result.status is Status.COMPLETED
            assert done.episode.memory["ended_by"] == why
            assert done.result.metrics.num_turns == num_turns
            assert done.result.metrics.num_tool_calls == num_turns - 1
            assert done.result.trajectories[0].segments[-1].origin == Origin.ACTION

    def test_an_answer_at_the_limit_is_an_answer(self):
        """`ended_by` is `answer` when the last allowed turn makes no call."""
        assert converse("done", max_assistant_turns=1).episode.memory["ended_by"] == "answer"

    def test_no_tool_runs_without_room(self):
        """A tool has side effects, so it does not run when the budget has no room for its response."""
        ran = []

        def act() -> str:
            ran.append(1)
            return "acted"

        text = call("act")
        done = converse(
            text, tools=(act,), limits={"response_length": len(AgentProbe(make_agent=User, turns=(text,)).turn_ids[0])}
        )
        assert done.result.status is Status.TRUNCATED
        assert ran == []
        done = converse(text, "x", tools=(act,), limits={"response_length": 20})
        assert (done.result.status, ran) == (Status.TRUNCATED, [])

    def test_an_observation_that_does_not_fit_is_not_appended(self):
        """The record and the messages end with the model's turn."""

        def long() -> str:
            return "x" * 200

        done = converse(call("long"), tools=(long,), limits={"response_length": 100})
        assert done.result.status is Status.TRUNCATED
        assert [message["role"] for message in done.result.messages] == ["user", "assistant"]
        assert done.result.trajectories[0].segments[-1].origin == Origin.ACTION

    def test_a_truncated_turn_is_closed_before_the_response(self):
        """A call without its end-of-turn token is malformed, and the response starts with that token."""
        done = converse("<tool_call>{", "ok", closed=False)
        text = probe_resources().chat.tokenizer.decode(done.result.trajectories[0].response_ids)
        assert text == (
            "<tool_call>{<|im_end|>\n<|im_start|>user\n<tool_response>\nError: malformed call: JSONDecodeError\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\nok<|im_end|>"
        )


def shorten(text, max_chars, side):
    return truncate(ToolResult(text=text), max_chars, side).text


class TestTruncation:
    """Truncation of tool responses."""

    @given(st.text(max_size=80), st.integers(1, 90), st.sampled_from(["left", "right", "middle"]))
    def test_a_response_never_exceeds_its_limit(self, text, max_chars, kept):
        """A short response is unchanged; a long one consists of its head, the mark and its tail."""
        cut = shorten(text, max_chars, kept)
        assert len(cut) == min(len(text), max_chars)
        if len(text) <= max_chars:
            assert cut == text
        elif max_chars > len(MARK):
            head, mark, tail = cut.partition(MARK)
            assert (head + tail, mark) == (text[: len(head)] + text[len(text) - len(tail) :], MARK)

    def test_sides_match_verl(self):
        """`left` removes the beginning, `right` the end, `middle` all but both ends."""
        text = "0123456789" * 10
        assert shorten(text, 25, "right") == "01234567...(truncated)..."
        assert shorten(text, 25, "left") == "...(truncated)...23456789"
        assert shorten(text, 25, "middle") == "0123...(truncated)...6789"
        assert shorten(text, 3, "left") == "789"

    def test_the_model_reads_the_truncated_response(self):
        """Errors are truncated too."""

        def long() -> str:
            return "x" * 1000

        done = converse(call("long"), call("y" * 60), "ok", tools=(long,), max_tool_response_length=30)
        assert [len(text) for text in tool_texts(done)] == [30, 30]


class TestInteraction:
    """A simulated user replies to turns that call no tool."""

    def test_a_user_replies_until_it_terminates(self):
        """Its rewards are kept, and the terminating reply is not appended."""
        user = User([Reply(content="More.", reward=0.5), Reply(content="Bye.", should_terminate=True, reward=1.0)])
        done = converse("One.", "Two.", user=user)
        assert done.result.status is Status.COMPLETED
        assert [message["content"] for message in done.result.messages] == ["Question 0?", "One.", "More.", "Two."]
        assert done.episode.memory["turn_rewards"] == [0.5, 1.0]
        assert done.episode.memory["ended_by"] == "interaction"
        assert user.seen == [2, 4]

    def test_tools_come_before_the_user(self):
        """Tools respond to a turn with calls, and the user replies to a turn without."""
        user = User([Reply(content="And?"), Reply(should_terminate=True)])
        done = converse(call(a=1, b=1), "2", call(a=2, b=2), "4", user=user)
        roles = [message["role"] for message in done.result.messages]
        assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant"]

    def test_the_user_is_not_asked_when_no_turn_is_left(self):
        """The model has the last turn with a simulated user too."""
        user = User([Reply(content="More."), Reply(content="More.")])
        done = converse("One.", "Two.", user=user, max_assistant_turns=2)
        assert (done.episode.memory["ended_by"], user.seen) == ("max_assistant_turns", [2])

    def test_a_user_without_tools_or_parser(self):
        """The agent is then a plain chat."""
        user = User([Reply(content="Continue."), Reply(should_terminate=True)])
        resources = evolve(probe_resources(), tools={}, parser=None, interaction=user)
        probe = AgentProbe(make_agent=lambda: make_tool_agent(ToolAgentConfig(), resources), resources=resources)
        done = asyncio.run(probe.run(make_task()))
        assert [message["role"] for message in done.result.messages] == ["user", "assistant", "user", "assistant"]


class TestSetup:
    """Construction of the agent."""

    def test_a_system_prompt_comes_first(self):
        """The config's prompt is inserted, and a system message of the task has priority."""
        done = converse("ok", system_prompt="Be brief.")
        assert done.result.messages[0] == {"role": "system", "content": "Be brief."}
        own = ({"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"})
        assert converse("ok", task=make_task(messages=own), system_prompt="Be brief.").result.messages[:2] == own

    def test_missing_resources_are_refused(self):
        """The error names the missing chat template or parser."""
        with pytest.raises(ConfigError, match="agent 'tool_agent' writes prompts"):
            make_tool_agent(ToolAgentConfig(), Resources())
        with pytest.raises(ConfigError, match="agent 'tool_agent' cannot find tool calls: set parser"):
            make_tool_agent(ToolAgentConfig(), evolve(probe_resources(), parser=None))

    @pytest.mark.parametrize(
        "options",
        [
            {"max_parallel_calls": 0},
            {"max_assistant_turns": 0},
            {"max_user_turns": 0},
            {"max_tool_response_length": 0},
            {"tool_response_truncate_side": "both"},
        ],
    )
    def test_options_out_of_range_are_refused(self, options):
        """The error names the option."""
        with pytest.raises(ValueError, match=next(iter(options))):
            ToolAgentConfig(**options)

    def test_an_unknown_state_is_refused(self):
        """The error names the agent and the state."""
        agent = make_tool_agent(ToolAgentConfig(), probe_resources())

        class Odd:
            state = "odd"

        with pytest.raises(ValueError, match="tool_agent has no state 'odd'"):
            asyncio.run(agent.step(Odd()))
        assert State.PENDING == "pending"


MOVING_TOOLS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
"""Puts tools before the newest user message, as Mistral's template does, and knows no tool messages, as Gemma's."""


def resources_with(template, **changes):
    chat = ChatTemplate(byte_tokenizer(template, bos_token="<s>", eos_token="</s>"))
    return evolve(probe_resources(), chat=chat, **changes)


NO_TOOLS = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_that_shows_no_tools():
    """The run is refused, unless the prompts of its tasks describe the tools; without tools it starts."""
    with pytest.raises(ConfigError, match=r"tools are not shown; `chat: .*`.*; or name a template in model\.chat"):
        make_tool_agent(ToolAgentConfig(), resources_with(NO_TOOLS))
    make_tool_agent(ToolAgentConfig(), resources_with(NO_TOOLS, tools={}, parser=None))

    resources = resources_with(NO_TOOLS)
    agent = make_tool_agent(ToolAgentConfig(tools_in_prompt=True), resources)
    done = asyncio.run(AgentProbe(make_agent=lambda: agent, resources=resources, turns=("It is 5.",)).run(make_task()))
    assert done.result.status is Status.COMPLETED, done.result.fault


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "cannot append a tool message: it fails: Only user and assistant roles are supported!"),
        ({"interaction": User([])}, "cannot append a tool message"),
        ({"tools": {}, "interaction": User([])}, ""),
        ({"tools": {}}, ""),
    ],
)
def test_a_template_that_cannot_append(parts, text):
    """It is refused before the run where it matters: tool results, but not replies of a user without tools."""
    resources = resources_with(MOVING_TOOLS, **parts)
    with pytest.raises(ConfigError, match=text) if text else nullcontext():
        make_tool_agent(ToolAgentConfig(), resources)
    make_tool_agent(ToolAgentConfig(max_assistant_turns=1), resources)


def test_tools_that_move_and_a_user():
    """With tools, the template renders the replies of a user elsewhere, so the run is refused."""
    template = MOVING_TOOLS.replace("{%- elif message.role == 'assistant' %}", """\
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' %}""")  # fmt: skip
    make_tool_agent(ToolAgentConfig(), resources_with(template))
    with pytest.raises(ConfigError, match="cannot append a user message: they read differently when tools are given"):
        make_tool_agent(ToolAgentConfig(), resources_with(template, interaction=User([])))


def test_a_conversation_without_tools_in_such_a_template():
    """The reply of the user follows the turn of the model as the template renders it."""
    resources = resources_with(MOVING_TOOLS, tools={}, interaction=User([Reply(content="And 2 + 2?")]))
    agent = make_tool_agent(ToolAgentConfig(max_assistant_turns=2), resources)
    probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=("It is 5.", "It is 4."))
    done = asyncio.run(probe.run(make_task()))

    assert done.result.status is Status.COMPLETED, done.result.fault
    text = resources.chat.tokenizer.decode(done.result.trajectories[0].input_ids)
    turn = r"It is [45]\.</s>"  # the probe's engine picks one of the texts
    assert re.fullmatch(rf"<s>\[INST\] Question 0\?\[/INST\]{turn}\[INST\] And 2 \+ 2\?\[/INST\]{turn}", text)
