"""The three shipped middlewares, around real tools and rewards."""

import asyncio
from types import SimpleNamespace

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise import Report, RunInfo, Task, TokenScore, ToolCall, ToolResult, TrajectoryScore, TurnScore
from turnwise.errors import ToolError
from turnwise.tools.toolbox import ToolBox
from turnwise_middleware import RedactSecretsConfig, ShapeRewardConfig, ToolRateConfig, wrap_tool
from turnwise_middleware.redact_secrets import RedactSecrets
from turnwise_middleware.shape_reward import ShapeReward
from turnwise_middleware.tool_rate import ToolRate
from turnwise_testing.checks.wrapper import middleware_probe

TASK = Task(messages=({"role": "user", "content": "?"},), uid="a")
SECRETS = (
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_" + "a1B2" * 9,
    "sk-proj-" + "x" * 30,
    "hf_" + "A" * 34,
    "xoxb-1234567890-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc-_123",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
)


class Echo:
    """Returns its text, or raises it; it can be suspended."""

    def __init__(self, name="echo", error=None):
        properties = {"text": {"type": "string"}}
        function = {"name": name, "description": "", "parameters": {"type": "object", "properties": properties}}
        self.schema = {"type": "function", "function": function}
        self.error = error

    async def create(self, _task):
        return "session"

    async def execute(self, session, arguments):
        assert session == "session"
        if self.error is not None:
            raise self.error(arguments["text"])
        return ToolResult(text=arguments["text"])

    async def release(self, session):
        assert session == "session"
        return 0.5

    async def suspend(self, session):
        return session

    async def restore(self, _task, notes):
        return notes


def wrapped(middleware, tool):
    """Return a tool inside of a middleware."""
    return wrap_tool(tool, RunInfo(config={}, role="driver", section=(middleware,)))


def probe_of(middleware):
    """Return the probe of a middleware."""
    return middleware_probe(lambda: middleware)


def call(middleware, *texts, tool=None):
    """Return the results of calls of one session, and the reward of its release."""
    tool = tool or Echo()

    async def run():
        session = ToolBox([wrapped(middleware, tool)]).open_session(TASK, {})
        name = tool.schema["function"]["name"]
        results = [await session.call(ToolCall(name=name, arguments={"text": text})) for text in texts]
        await session.release()
        return results, session.released_reward

    return asyncio.run(run())


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("error", [None, ToolError, ValueError])
def test_secrets_are_removed(secret, error):
    """From results, and from the texts of errors; the result says who changed it."""
    text = f"the key is {secret} .\nnext"
    (result,), reward = call(RedactSecrets(RedactSecretsConfig()), text, tool=Echo(error=error))

    assert secret not in result.text
    assert result.text.endswith("the key is [redacted] .\nnext")
    assert result.error is (error is not None)
    assert {"middleware/redact_secrets/changed_result": 1.0} == result.metrics
    assert 0.5 == reward


def test_secrets_are_removed_from_reports():
    """People see the results of a run, too."""
    report = Report(title=f"echo {SECRETS[0]}", text=SECRETS[0], facts={"key": SECRETS[0], "seconds": 0.5})
    result = ToolResult(text="ok", report=report)

    redacted = asyncio.run(RedactSecrets(RedactSecretsConfig()).after_tool(SimpleNamespace(name="echo"), result))

    kept = Report(title="echo [redacted]", text="[redacted]", facts={"key": "[redacted]", "seconds": 0.5})
    assert kept == redacted.report


@given(text=st.text(max_size=60))
def test_other_texts_stay(text):
    """A text without secrets is the same object with no note."""
    (result,), _reward = call(RedactSecrets(RedactSecretsConfig()), text.encode(errors="replace").decode())

    assert text.encode(errors="replace").decode() == result.text
    assert {} == result.metrics


def test_values_of_the_environment(monkeypatch):
    """The longest value is removed first; short ones are no secrets."""
    monkeypatch.setenv("A_KEY", "hunter")
    monkeypatch.setenv("B_KEY", "hunter2hunter")
    monkeypatch.setenv("C_KEY", "1")
    config = RedactSecretsConfig(environment=("A_KEY", "B_KEY", "C_KEY", "D_KEY"), replacement="*", tools=("echo",))
    results, _reward = call(RedactSecrets(config), "hunter2hunter hunter 1")
    other, _reward = call(RedactSecrets(config), "hunter", tool=Echo("other"))

    assert ["* * 1"] == [result.text for result in results]
    assert ["hunter"] == [result.text for result in other]


def test_a_wrong_pattern_is_refused():
    """When the config is read, and not at the first call."""
    with pytest.raises(ValueError, match="no regular expression"):
        RedactSecretsConfig(patterns=("(",))


def test_the_observation_has_the_changed_text():
    """The record and the messages have no secret, and the metrics say so."""
    plain = probe_of(ToolRate(ToolRateConfig()))
    redacting = probe_of(RedactSecrets(RedactSecretsConfig(patterns=(r"\d+",))))

    async def run(probe):
        return [(await probe.run(number)).result for number in range(8)]

    seen = asyncio.run(run(plain))
    changed = asyncio.run(run(redacting))
    shown = {message["content"] for result in changed for message in result.messages if message["role"] == "tool"}
    digits = {message["content"] for result in seen for message in result.messages if message["role"] == "tool"}
    assert any(text.isdigit() for text in digits)
    assert "[redacted]" in shown
    assert not any(text.isdigit() for text in shown)
    name = "tool/middleware/redact_secrets/changed_result"
    counts = [sum(m["content"] == "[redacted]" for m in result.messages) for result in changed]
    assert counts == [result.metrics.extra.get(name, 0) for result in changed]


def test_calls_beyond_the_number_are_refused():
    """The tool is not called, the model reads an error, and the note is in the result."""
    results, _reward = call(ToolRate(ToolRateConfig(max_calls=2)), "a", "b", "c", "d")

    assert ["a", "b"] == [result.text for result in results[:2]]
    refused = ("Error: 'echo' may be called 2 times; continue without it", True)
    assert {refused} == {(result.text, result.error) for result in results[2:]}
    assert [{}, {}, *[{"middleware/tool_rate/vetoed_call": 1.0}] * 2] == [dict(result.metrics) for result in results]


def test_the_number_of_calls_survives_an_interruption():
    """The notes of a suspended session have it."""
    tool = wrapped(ToolRate(ToolRateConfig(max_calls=1)), Echo())

    async def run():
        session = ToolBox([tool]).open_session(TASK, {})
        await session.call(ToolCall(name="echo", arguments={"text": "a"}))
        again = ToolBox([tool]).open_session(TASK, await session.suspend())
        result = await again.call(ToolCall(name="echo", arguments={"text": "b"}))
        await again.release()
        return result, again.released_reward

    result, reward = asyncio.run(run())
    assert result.error
    assert 0.5 == reward


def test_calls_of_all_episodes_wait_for_each_other(monkeypatch):
    """At two calls a second the waits are half a second apart."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("turnwise_middleware.tool_rate.time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr("turnwise_middleware.tool_rate.asyncio", SimpleNamespace(sleep=sleep))
    middleware = ToolRate(ToolRateConfig(per_second=2.0, tools=("echo",)))
    for text in ("a", "b", "c"):
        call(middleware, text)
    call(middleware, "d", tool=Echo("other"))

    assert [0.0, 0.5, 1.0] == waits


@given(
    value=st.floats(-10, 10),
    turns=st.integers(0, 6),
    config=st.builds(
        ShapeRewardConfig,
        scale=st.floats(-2, 2),
        turn_price=st.floats(0, 1),
        free_turns=st.integers(0, 3),
        least=st.none() | st.floats(-5, 0),
        most=st.none() | st.floats(0, 5),
    ),
)
def test_shaped_rewards(value, turns, config):
    """The sum is scaled, priced and bounded, and all but the last score of a record stay."""
    episode = SimpleNamespace(turn_records=range(turns))
    scores = (TurnScore(values=(1.0,)), TrajectoryScore(value=value), TokenScore(values=()))
    shaped = asyncio.run(ShapeReward(config).after_reward(episode, scores))
    expected = config.scale * (1.0 + value) - config.turn_price * max(0, turns - config.free_turns)
    expected = max(expected, config.least) if config.least is not None else expected
    expected = min(expected, config.most) if config.most is not None else expected

    assert (scores[0], scores[2]) == (shaped[0], shaped[2])
    assert expected == pytest.approx(1.0 + shaped[1].value, abs=1e-9)


def test_scores_of_turns_alone_are_refused():
    """There is no place for the difference."""
    episode, scores = SimpleNamespace(turn_records=()), (TurnScore(values=(1.0,)),)
    with pytest.raises(TypeError, match="needs a score for a whole record"):
        asyncio.run(ShapeReward(ShapeRewardConfig(scale=2.0)).after_reward(episode, scores))
    assert () == asyncio.run(ShapeReward(ShapeRewardConfig(scale=2.0)).after_reward(episode, ()))
    assert scores == asyncio.run(ShapeReward(ShapeRewardConfig()).after_reward(episode, scores))


def test_the_metrics_have_the_shaped_reward():
    """The episode's result has the new score, and a note."""
    probe = probe_of(ShapeReward(ShapeRewardConfig(scale=0.5)))
    result = asyncio.run(probe.run(0)).result

    assert sum(each.num_response_tokens for each in result.trajectories) / 2 == result.reward
    assert 1.0 == result.metrics.extra["middleware/shape_reward/changed_reward"]
    assert evolve(result.scores[0], value=0.0) == TrajectoryScore(value=0.0)
