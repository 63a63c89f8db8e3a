"""`parallel_thinking` and `parallel_r1` pass the conformance suites of agents and rewards."""

from hashlib import blake2b

import pytest
from attrs import frozen

from turnwise import Resources
from turnwise_parallel_thinking.config import ParallelR1Config, ParallelThinkingConfig
from turnwise_testing import AgentSuite, RewardSuite
from turnwise_testing.checks.reward import RewardExample
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES
from turnwise_testing.probes.agent import AgentProbe

MAIN = ("Final Answer: 42", "Let us see.<Parallel>", "<Parallel>", "Grüße, 世界", "No <Path> here</Path><Summary>")
PATHS = ("One way</Path>", "</Path>", "Another, much longer way: 世界</Path>", "A <Parallel> in a path</Path>")
SUMMARIES = ("All agree</Summary>", "</Summary>")


@frozen(kw_only=True)
class ParallelProbe(AgentProbe):
    """A probe whose model writes the requested kind of text, and ends a turn only outside blocks."""

    turns: tuple[str, ...] = (*MAIN, *PATHS, *SUMMARIES)
    exact: bool = False

    def choose(self, request):
        """Return a turn of the requested kind, chosen by a hash of the context."""
        stops = {self.chat.tokenizer.decode([i]) for i in request.sampling.stop_token_ids}
        texts = PATHS if "</Path>" in stops else SUMMARIES if "</Summary>" in stops else MAIN
        key = f"{request.sampling.seed}".encode() + request.token_ids.astype("<i4").tobytes()
        text = texts[int.from_bytes(blake2b(key, digest_size=4).digest(), "little") % len(texts)]
        return [*self.chat.tokenizer.encode(text), self.chat.stop_token_ids[0]]

    def engine(self, **options):
        """Return the scripted model, with or without layouts."""
        from attrs import evolve

        return AgentProbe.engine(self, **{"capabilities": evolve(SCRIPTED_CAPABILITIES, layouts=self.exact), **options})


class TestExpanded(AgentSuite):
    """The suite on an engine without layouts."""

    entry_point = "parallel_thinking"
    module = "turnwise_parallel_thinking"
    registered = "parallel_thinking"
    exact = False

    @pytest.fixture
    def config(self):
        """At most two blocks of three paths."""
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
    """The suite on an engine with layouts."""

    exact = True


class TestParallelR1(RewardSuite):
    """The suite with the scheme `accuracy`."""

    entry_point = "parallel_thinking"
    module = "turnwise_parallel_thinking"
    registered = "parallel_r1"

    @pytest.fixture
    def config(self):
        """The default options, which score accuracy."""
        return ParallelR1Config()

    @pytest.fixture
    def examples(self):
        """Answers that are right in another notation, wrong, and missing."""
        return (
            RewardExample(answer="It is so.\nFinal Answer: $\\boxed{1,000}$.", ground_truth="1000", expected=1.0),
            RewardExample(answer="Final Answer: 1\nno:\nFinal Answer: 2", ground_truth="1", expected=-1.0),
            RewardExample(answer="I do not know.", ground_truth="1", expected=-1.0),
        )
