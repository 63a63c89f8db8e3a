"""`torl_python` and `torl_math` pass the conformance suites of agents and rewards."""

import pytest
from attrs import frozen

from turnwise import Resources
from turnwise_plain_functions import tool
from turnwise_testing import AgentSuite, RewardSuite
from turnwise_testing.checks.reward import RewardExample
from turnwise_testing.probes.agent import AgentProbe, probe_chat
from turnwise_torl_python.config import TorlPythonConfig

TURNS = (
    "The answer is \\boxed{42}.",
    "First:\n```python\nprint(2 + 3)\n```\n```output",
    "Again:\n```python\nx\n```\nand\n```python\nprint(1)\n```\n```outputs",
    "No block at all ```output",
    "Unclosed:\n```python\nprint(1)\n```output",
    "Broken\n```python\nfail\n```\n```output",
    'Öffne `output` in "```out": 世界, kein Ende',
)


def python(code: str) -> str:
    """
    Imitates a sandbox.

    Args:
        code: The program.
    """
    if "fail" in code:
        raise RuntimeError("failed")
    return f"{len(code)} characters\n"


@frozen(kw_only=True)
class ContinuingProbe(AgentProbe):
    """A probe whose model continues its unfinished turn, wherever the engine stopped it."""

    def choose(self, request):
        """Return the rest of the turn whose start ends the context, or a new turn."""
        context = request.token_ids.tolist()
        for length in range(max(map(len, self.turn_ids)), 0, -1):
            for turn in self.turn_ids:
                if length < len(turn) and context[-length:] == turn[:length]:
                    return turn[length:]
        return AgentProbe.choose(self, request)


class TestTorlPython(AgentSuite):
    """The suite with ToRL's plain prompt."""

    entry_point = "torl_python"
    module = "turnwise_torl_python"
    registered = "torl_python"

    @pytest.fixture
    def resources(self):
        """A tokenizer, and a tool that runs nothing."""
        return Resources(chat=probe_chat(), tools={"python": tool(python)})

    @pytest.fixture
    def probe(self, config, resources):
        """A model that writes code blocks."""
        factory = self.entry().factory
        return ContinuingProbe(make_agent=lambda: factory(config, resources), resources=resources, turns=TURNS)


class TestTorlPythonWithTheChatTemplate(TestTorlPython):
    """The suite with the chat template."""

    @pytest.fixture
    def config(self):
        """The chat template, and at most two programs."""
        return TorlPythonConfig(template="chat", max_tool_calls=2)


class TestTorlMath(RewardSuite):
    """The suite with default options."""

    entry_point = "torl_python"
    module = "turnwise_torl_python"
    registered = "torl_math"

    @pytest.fixture
    def examples(self):
        """Answers that are right in another notation, wrong, and missing."""
        return (
            RewardExample(answer="It is \\boxed{\\frac{1}{2}}.", ground_truth="0.5", expected=1.0),
            RewardExample(answer="\\boxed{1} no, \\boxed{2}", ground_truth="1", expected=-1.0),
            RewardExample(answer="I do not know.", ground_truth="1", expected=-1.0),
            RewardExample(answer="\\boxed{2\\sqrt{3}}", ground_truth="\\boxed{\\sqrt{12}}", expected=1.0),
        )
