"""Tests of `torl_python` beyond the conformance suite: turns, masks and outputs."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import Resources, Status
from turnwise_testing.probes.agent import probe_chat
from turnwise_torl_python import make_torl_python
from turnwise_torl_python.agent import STOP
from turnwise_torl_python.config import TORL_PROMPT, TorlPythonConfig

END = "<|im_end|>"
CHAT = probe_chat()


def call(code, tail=""):
    return f"Let us compute.\n```python\n{code}\n```\n{STOP}{tail}"


def segments(run):
    """Return (mask, text) of each run of tokens with the same mask."""
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
        """The model's tokens have mask 1, its stop string included; the agent's tokens have mask 0."""
        calls = [call(f"{n} + 1") for n in range(num_calls)]
        done = converse(*calls, "So \\boxed{7}.", max_tool_calls=5)
        expected = []
        for n, text in enumerate(calls):
            expected += [(1, text), (0, f"\n{n + 1}\n```\n")]
        assert segments(done) == [*expected, (1, f"So \\boxed{{7}}.{END}")]
        assert done.result.status is Status.COMPLETED
        assert (done.episode.memory["calls"], done.episode.memory["successes"]) == (num_calls, num_calls)
        assert done.result.metrics.num_tool_calls == num_calls

    def test_the_prompt_matches_torl(self, converse):
        """The prompt is a plain string, or the chat template with the instruction as the system message."""
        (trajectory,) = converse("x").result.trajectories
        assert CHAT.tokenizer.decode(trajectory.prompt_ids) == TORL_PROMPT.replace("[PROMPT]", "Question 0?")
        (trajectory,) = converse("x", template="chat").result.trajectories
        text = CHAT.tokenizer.decode(trajectory.prompt_ids)
        assert text.startswith("<|im_start|>system\nPlease integrate natural language reasoning with programs")
        assert text.endswith("<|im_start|>user\nQuestion 0?<|im_end|>\n<|im_start|>assistant\n")

    def test_the_messages(self, converse):
        """Turns include their stop string, and outputs are tool messages."""
        done = converse(call("1 + 1"), "2.")
        assert [(m["role"], m["content"]) for m in done.result.messages] == [
            ("user", "Question 0?"),
            ("assistant", call("1 + 1")),
            ("tool", "2"),
            ("assistant", "2."),
        ]

    def test_the_last_complete_block_of_the_turn_is_run(self, converse):
        """Earlier blocks, blocks of earlier turns, and unclosed blocks do not run."""
        two = "```python\n1 + 1\n```\nor\n```python\n2 + 2\n```\n```output"
        unclosed = "```python\n3 + 3\n```\n```python\n9 + 9\n```output"
        done = converse(two, unclosed, "Nothing. ```output", "x", max_tool_calls=5)
        assert shown(done) == ["4", "6", "Error: there is no complete ```python block before this output"]
        memory = done.episode.memory
        assert (memory["rounds"], memory["calls"], memory["successes"]) == (3, 2, 2)
        metrics = done.result.metrics
        assert metrics.extra == {"programs_passed": 2, "tool_output_tokens": metrics.num_tokens["observation"]}

    def test_fences_in_strings(self, converse):
        """Programs and outputs may contain fences."""
        seen = []

        def python(code: str) -> str:
            seen.append(code)
            return "```"

        code = "print('```')\ns = '''\n```\n'''"
        done = converse(call(code), "x", python=python)
        assert seen == [f"{code}\n"]
        assert segments(done)[1] == (0, "\n```\n```\n")

    def test_after_the_last_call_an_output_block_is_an_action(self, converse):
        """An output that the model invents is not replaced and not counted."""
        invented = f"{call('2 + 2')}\n5\n```\nSo \\boxed{{5}}."
        done = converse(call("1 + 1"), invented, max_tool_calls=1)
        assert segments(done) == [(1, call("1 + 1")), (0, "\n2\n```\n"), (1, invented + END)]
        assert done.episode.memory["calls"] == done.result.metrics.num_tool_calls == 1

    def test_without_calls_there_is_no_stop_string(self, converse):
        """`max_tool_calls: 0` needs no tool, and an output block is part of the model's turn."""
        agent = make_torl_python(TorlPythonConfig(max_tool_calls=0), Resources(chat=CHAT))
        assert agent is not None
        done = converse(call("1 + 1", "\n2\n```\n2."), max_tool_calls=0)
        assert segments(done) == [(1, call("1 + 1", "\n2\n```\n2.") + END)]

    def test_each_request_is_limited_by_the_budget(self, played, make_resources, make_script):
        """Only the budget limits the first request of a turn."""
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
    """Plain string operations derive the same ids and mask, byte by byte."""
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
    """Format of outputs."""

    def test_errors(self, converse):
        """A failed program shows its last line, as in ToRL, or the whole text, and counts as failed."""
        done = converse(call("crash"), "x")
        assert shown(done) == ["ValueError: crash"]
        assert (done.episode.memory["calls"], done.episode.memory["successes"]) == (1, 0)
        assert done.result.metrics.extra["programs_passed"] == 0
        whole = shown(converse(call("crash"), "x", errors="whole"))[0]
        assert whole == "printed before\nTraceback (most recent call last):\n  File x\nValueError: crash"

    def test_a_silent_program(self, converse):
        """Its output is `empty_output`, and it counts as a success."""
        done = converse(call("silent"), "x", empty_output="(nothing)")
        assert shown(done) == ["(nothing)"]
        assert done.episode.memory["successes"] == 1

    def test_long_outputs_keep_head_and_tail(self, converse):
        """Head and tail have half of the limit each; an output within the limit is unchanged."""
        assert shown(converse(call("repeat 500"), "x")) == [f"{'ab' * 64}...{'ab' * 64}"]
        assert shown(converse(call("repeat 128"), "x")) == ["ab" * 128]
        assert shown(converse(call("repeat 200"), "x", max_output_chars=None)) == ["ab" * 200]

    def test_a_tool_that_raises_counts_as_a_failed_program(self, converse):
        """The model reads the error."""
        assert shown(converse(call("one + 1"), "x")) == [
            "Error: ValueError: invalid literal for int() with base 10: 'one '"
        ]

    def test_an_infrastructure_failure_fails_the_episode(self, converse):
        """It is not shown as an output, and the sampled tokens are kept."""
        done = converse(call("down"))
        assert done.result.status is Status.FAILED
        assert (done.result.fault.owner, done.result.fault.message) == ("infra", "no sandbox")
        assert segments(done) == [(1, call("down"))]
        assert shown(done) == []
