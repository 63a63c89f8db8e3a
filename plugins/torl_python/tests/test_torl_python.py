"""What `torl_python` does beyond what every agent must: turns, masks and outputs."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import Resources, Status
from turnwise.testing.agent_probe import probe_chat
from turnwise_torl_python import make_torl_python
from turnwise_torl_python.agent import STOP
from turnwise_torl_python.config import TORL_PROMPT, TorlPythonConfig

END = "<|im_end|>"
CHAT = probe_chat()


def call(code, tail=""):
    return f"Let us compute.\n```python\n{code}\n```\n{STOP}{tail}"


def segments(run):
    """Return (mask, text) of each unbroken run of tokens of one mask."""
    (trajectory,) = run.result.trajectories
    found: list[list] = []
    for token_id, mask in zip(trajectory.response_ids.tolist(), trajectory.response_mask.tolist(), strict=True):
        if not found or found[-1][0] != mask:
            found.append([mask, []])
        found[-1][1].append(token_id)
    return [(mask, CHAT.tokenizer.decode(ids)) for mask, ids in found]


def shown(run):
    return [message["content"] for message in run.result.messages if message["role"] == "tool"]


class TestProtocol:
    """Turns, outputs and masks."""

    @pytest.mark.parametrize("num_calls", range(6))
    def test_calls_and_masks(self, num_calls, converse):
        """What the model wrote has mask 1, its stop string too; what the harness added has mask 0."""
        calls = [call(f"{n} + 1") for n in range(num_calls)]
        done = converse(*calls, "So \\boxed{7}.", max_tool_calls=5)
        expected = []
        for n, text in enumerate(calls):
            expected += [(1, text), (0, f"\n{n + 1}\n```\n")]
        assert segments(done) == [*expected, (1, f"So \\boxed{{7}}.{END}")]
        assert done.result.status is Status.COMPLETED
        assert (done.episode.memory["calls"], done.episode.memory["successes"]) == (num_calls, num_calls)
        assert done.result.metrics.num_tool_calls == num_calls

    def test_the_prompt_is_torls(self, converse):
        """One plain string; or the chat template, with the instruction as the system message."""
        (trajectory,) = converse("x").result.trajectories
        assert CHAT.tokenizer.decode(trajectory.prompt_ids) == TORL_PROMPT.replace("[PROMPT]", "Question 0?")
        (trajectory,) = converse("x", template="chat").result.trajectories
        text = CHAT.tokenizer.decode(trajectory.prompt_ids)
        assert text.startswith("<|im_start|>system\nPlease integrate natural language reasoning with programs")
        assert text.endswith("<|im_start|>user\nQuestion 0?<|im_end|>\n<|im_start|>assistant\n")

    def test_the_messages(self, converse):
        """Turns with their stop string, and outputs as tool messages."""
        done = converse(call("1 + 1"), "2.")
        assert [(m["role"], m["content"]) for m in done.result.messages] == [
            ("user", "Question 0?"),
            ("assistant", call("1 + 1")),
            ("tool", "2"),
            ("assistant", "2."),
        ]

    def test_the_last_complete_block_of_the_turn_is_run(self, converse):
        """Not an earlier one, not one of an earlier turn, not an open one."""
        two = "```python\n1 + 1\n```\nor\n```python\n2 + 2\n```\n```output"
        unclosed = "```python\n3 + 3\n```\n```python\n9 + 9\n```output"
        done = converse(two, unclosed, "Nothing. ```output", "x", max_tool_calls=5)
        assert shown(done) == ["4", "6", "Error: there is no complete ```python block before this output"]
        memory = done.episode.memory
        assert (memory["rounds"], memory["calls"], memory["successes"]) == (3, 2, 2)

    def test_fences_in_strings(self, converse):
        """A program may print fences, and an output may hold them."""
        seen = []

        def python(code: str) -> str:
            seen.append(code)
            return "```"

        code = "print('```')\ns = '''\n```\n'''"
        done = converse(call(code), "x", python=python)
        assert seen == [f"{code}\n"]
        assert segments(done)[1] == (0, "\n```\n```\n")

    def test_after_the_last_call_an_output_block_is_an_action(self, converse):
        """The model may invent one; it is not answered and not counted."""
        invented = f"{call('2 + 2')}\n5\n```\nSo \\boxed{{5}}."
        done = converse(call("1 + 1"), invented, max_tool_calls=1)
        assert segments(done) == [(1, call("1 + 1")), (0, "\n2\n```\n"), (1, invented + END)]
        assert done.episode.memory["calls"] == done.result.metrics.num_tool_calls == 1

    def test_without_calls_nothing_is_looked_for(self, converse):
        """`max_tool_calls: 0` needs no tool, and the model's own output block is its own."""
        agent = make_torl_python(TorlPythonConfig(max_tool_calls=0), Resources(chat=CHAT))
        assert agent is not None
        done = converse(call("1 + 1", "\n2\n```\n2."), max_tool_calls=0)
        assert segments(done) == [(1, call("1 + 1", "\n2\n```\n2.") + END)]

    def test_each_request_asks_for_what_is_left(self, played, make_resources, make_script):
        """The first request of a turn is bounded by the budget, and by nothing else."""
        budgets = []
        script = make_script(
            [CHAT.tokenizer.encode(call("1 + 1")), [*CHAT.tokenizer.encode("2."), CHAT.stop_token_ids[0]]]
        )

        def watched(request):
            budgets.append((len(request.token_ids), request.sampling.max_tokens))
            return script(request)

        done = asyncio.run(played([], make_resources(), engine=watched, limits={"response_length": 300}))
        room = len(done.result.trajectories[0].prompt_ids) + 300
        assert {max_tokens for length, max_tokens in budgets} <= {1, *(room - length for length, _ in budgets)}
        assert budgets[0][1] == 300
        assert budgets[-1][1] == room - budgets[-1][0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [call("1 + 1"), call("crash"), call("silent"), "No code. ```output", "`out` ```outpu ```o `` ```output"]
        ),
        max_size=5,
    ),
    st.sampled_from(["\\boxed{1}", "ends in ```outpu", "```python\n1\n", ""]),
    st.integers(0, 5),
)
def test_the_mask_against_an_independent_derivation(converse, calls, last, max_tool_calls):
    """The record is what plain string work on the turns says, byte by byte."""
    outputs = {call("1 + 1"): "2", call("crash"): "ValueError: crash", call("silent"): "(no output)"}
    no_code = "Error: there is no complete ```python block before this output"
    text, mask = b"", []
    for turn in [*calls[:max_tool_calls], None]:
        written = (calls[max_tool_calls] if len(calls) > max_tool_calls else last) if turn is None else turn
        text += written.encode()
        mask += [1] * len(written.encode())
        if turn is not None:
            output = f"\n{outputs.get(turn, no_code)}\n```\n".encode()
            text += output
            mask += [0] * len(output)
    turns = [*calls[:max_tool_calls], calls[max_tool_calls] if len(calls) > max_tool_calls else last]
    (trajectory,) = converse(
        *turns, max_tool_calls=max_tool_calls, limits={"response_length": 4096}
    ).result.trajectories
    assert trajectory.response_ids.tolist() == [*text, CHAT.stop_token_ids[0]]
    assert trajectory.response_mask.tolist() == [*mask, 1]


class TestOutput:
    """What the model reads of a program."""

    def test_errors(self, converse):
        """The last line, as in ToRL, or all of it; the program counts as failed."""
        done = converse(call("crash"), "x")
        assert shown(done) == ["ValueError: crash"]
        assert (done.episode.memory["calls"], done.episode.memory["successes"]) == (1, 0)
        whole = shown(converse(call("crash"), "x", errors="whole"))[0]
        assert whole == "printed before\nTraceback (most recent call last):\n  File x\nValueError: crash"

    def test_a_silent_program(self, converse):
        """It says so, and has run."""
        done = converse(call("silent"), "x", empty_output="(nothing)")
        assert shown(done) == ["(nothing)"]
        assert done.episode.memory["successes"] == 1

    def test_long_outputs_keep_head_and_tail(self, converse):
        """Half of the limit each; up to the limit nothing is cut."""
        assert shown(converse(call("repeat 500"), "x")) == [f"{'ab' * 64}...{'ab' * 64}"]
        assert shown(converse(call("repeat 128"), "x")) == ["ab" * 128]
        assert shown(converse(call("repeat 200"), "x", max_output_chars=None)) == ["ab" * 200]

    def test_a_tool_that_raises_is_a_program_that_failed(self, converse):
        """The model reads the error."""
        assert shown(converse(call("one + 1"), "x")) == [
            "Error: ValueError: invalid literal for int() with base 10: 'one '"
        ]

    def test_an_infrastructure_failure_fails_the_episode(self, converse):
        """It is no empty output; what was sampled is kept."""
        done = converse(call("down"))
        assert done.result.status is Status.FAILED
        assert (done.result.fault.owner, done.result.fault.message) == ("infra", "no sandbox")
        assert segments(done) == [(1, call("down"))]
        assert shown(done) == []
