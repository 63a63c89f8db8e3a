"""`parallel_thinking` is an agent, and `parallel_r1` a reward, as every other."""

from hashlib import blake2b

import pytest
from attrs import frozen

from turnwise import Resources
from turnwise.testing.agent_probe import AgentProbe
from turnwise.testing.agent_suite import AgentSuite
from turnwise.testing.reward_checks import RewardExample
from turnwise.testing.reward_suite import RewardSuite
from turnwise.testing.scripted import SCRIPTED_CAPABILITIES
from turnwise_parallel_thinking.config import ParallelR1Config, ParallelThinkingConfig

MAIN = ("Final Answer: 42", "Let us see.<Parallel>", "<Parallel>", "Grüße, 世界", "No <Path> here</Path><Summary>")
PATHS = ("One way</Path>", "</Path>", "Another, much longer way: 世界</Path>", "A <Parallel> in a path</Path>")
SUMMARIES = ("All agree</Summary>", "</Summary>")


@frozen(kw_only=True)
class ParallelProbe(AgentProbe):
    """Its model writes what it is asked for, and never the end of its turn inside a block."""

    turns: tuple[str, ...] = (*MAIN, *PATHS, *SUMMARIES)
    exact: bool = False

    def choose(self, request):
        """Return a turn of the kind that is asked for, by a hash of the context."""
        stops = {self.chat.tokenizer.decode([i]) for i in request.sampling.stop_token_ids}
        texts = PATHS if "</Path>" in stops else SUMMARIES if "</Summary>" in stops else MAIN
        key = f"{request.sampling.seed}".encode() + request.token_ids.astype("<i4").tobytes()
        text = texts[int.from_bytes(blake2b(key, digest_size=4).digest(), "little") % len(texts)]
        return [*self.chat.tokenizer.encode(text), self.chat.stop_token_ids[0]]

    def engine(self, **options):
        """Return the scripted model, which takes layouts or not."""
        from attrs import evolve

        return AgentProbe.engine(self, **{"capabilities": evolve(SCRIPTED_CAPABILITIES, layouts=self.exact), **options})


class TestExpanded(AgentSuite):
    """The standard suite, on an engine that sees plain text."""

    entry_point = "parallel_thinking"
    module = "turnwise_parallel_thinking"
    registered = "parallel_thinking"
    exact = False

    @pytest.fixture
    def config(self):
        """Three paths, two blocks."""
        return ParallelThinkingConfig(num_paths=3, max_blocks=2, max_path_tokens=64)

    @pytest.fixture
    def resources(self, chat):
        """A tokenizer with the tags."""
        return Resources(chat=chat)

    @pytest.fixture
    def probe(self, config, resources):
        """A model that opens blocks."""
        factory = self.entry().factory
        return ParallelProbe(
            make_agent=lambda: factory(config, resources), resources=resources, exact=self.exact, response_length=512
        )


class TestExact(TestExpanded):
    """The standard suite, on an engine that takes layouts."""

    exact = True


class TestParallelR1(RewardSuite):
    """The standard suite."""

    entry_point = "parallel_thinking"
    module = "turnwise_parallel_thinking"
    registered = "parallel_r1"

    @pytest.fixture
    def config(self):
        """Accuracy."""
        return ParallelR1Config()

    @pytest.fixture
    def examples(self):
        """Answers that are right in other words, wrong, and missing."""
        return (
            RewardExample(answer="It is so.\nFinal Answer: $\\boxed{1,000}$.", ground_truth="1000", expected=1.0),
            RewardExample(answer="Final Answer: 1\nno:\nFinal Answer: 2", ground_truth="1", expected=-1.0),
            RewardExample(answer="I do not know.", ground_truth="1", expected=-1.0),
        )
