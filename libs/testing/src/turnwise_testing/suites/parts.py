"""The conformance suites of the kinds in `turnwise_testing.checks.part.KINDS`: their checks, one test each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.part import Part, checks_of
from turnwise_testing.suites.plugin import PluginSuite


class PartSuite(PluginSuite):
    """
    The base of the suites of one kind of part. A suite sets `kind`, and a plugin subclasses the suite::

        class TestFewestTokens(RouterSuite):
            entry_point = "fewest_tokens"
            module = "turnwise_fewest_tokens"
            registered = "fewest_tokens"

    The fixture `examples` must be overridden in the suites that say so. May be overridden: `config`, `resources`, and
    `probe`, the object that the checks get.

    Attributes:
        kind: of the parts, as in `turnwise_testing.checks.part.KINDS`.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        # The first plugin's suite imports the checks. They may load torch, which the other suites here do not need.
        for suite in cls.__mro__[1:]:
            if issubclass(suite, PartSuite) and "kind" in vars(suite) and "checks" not in vars(suite):
                suite.hook, suite.checks = f"register_{suite.kind}", checks_of(suite.kind).checks
                suite.add_tests()

    @pytest.fixture
    def resources(self, tmp_path: Path) -> Resources:
        """The resources of the factory; may be overridden."""
        return checks_of(self.kind).resources(tmp_path)

    @pytest.fixture
    def examples(self) -> tuple[Any, ...]:
        """Inputs with their expected outputs; must be overridden where the checks need them."""
        if needed := checks_of(self.kind).examples:
            raise NotImplementedError(f"override the fixture 'examples' with {needed}")
        return ()

    @pytest.fixture
    def probe(self, config: object, resources: Resources, examples: tuple[object, ...]) -> Any:
        """The probe of the part; may be overridden."""
        factory = self.entry().factory
        part = Part(
            make=lambda: factory(config, resources),
            name=self.registered,
            resources=resources,
            examples=tuple(examples),
        )
        return checks_of(self.kind).probe(part)


class AdapterSuite(PartSuite):
    """
    The conformance suite of adapters. A plugin's whole file::

        class TestPatterns(AdapterSuite):
            entry_point = "patterns"
            module = "turnwise_patterns"
            registered = "patterns"

            @pytest.fixture
            def examples(self):
                return (AdapterExample(kind="rewards", value=re.compile("yes")),)
    """

    kind = "adapters"


class AdvantageSuite(PartSuite):
    """The conformance suite of advantages."""

    kind = "advantages"


class AgentSuite(PartSuite):
    """
    The conformance suite of agents.

    The fixture `probe` has the turns of the scripted model: an agent with special tags overrides it with turns that use
    them.
    """

    kind = "agents"


class ChatSuite(PartSuite):
    """
    The conformance suite of chats.

    The chat is built with `byte_tokenizer`, which has ChatML's tokens. May be overridden: `resources`, whose model has
    the family's own tokenizer (`tokenizer_resources`), and `probe`, which tells how the family writes a turn.
    """

    kind = "chats"


class ColumnSuite(PartSuite):
    """
    The conformance suite of open columns: values drawn by hypothesis pass through all that happens to a record.

    May be overridden, if the values of a column are not any numbers of its type::

        @pytest.fixture
        def examples(self):
            return (strategies.integers(0, 63),)
    """

    kind = "columns"


class CommandSuite(PartSuite):
    """
    The conformance suite of commands. Must be overridden::

        @pytest.fixture
        def examples(self):
            return (CommandExample(arguments=["runs/first"], output="mean length"),)
    """

    kind = "commands"


class DiagnosticSuite(PartSuite):
    """The conformance suite of diagnostics."""

    kind = "diagnostics"


class GroupRewardSuite(PartSuite):
    """
    The conformance suite of group rewards. Must be overridden::

        @pytest.fixture
        def examples(self):
            return (GroupExample(answers=("It is 42.", "42"), expected=(0.0, 1.0)),)
    """

    kind = "group_rewards"


class InteractionSuite(PartSuite):
    """The conformance suite of user simulators; the fixture `probe` has the answers of the model and the task."""

    kind = "interactions"


class LossSuite(PartSuite):
    """The conformance suite of losses."""

    kind = "losses"


class MiddlewareSuite(PartSuite):
    """The conformance suite of middleware."""

    kind = "middleware"


class ObserverSuite(PartSuite):
    """The conformance suite of observers; one that writes files or opens ports overrides the fixture `config`."""

    kind = "observers"


class PostprocessorSuite(PartSuite):
    """The conformance suite of postprocessors; the fixture `probe` has the batches."""

    kind = "postprocessors"


class ReasoningParserSuite(PartSuite):
    """
    The conformance suite of reasoning parsers. Must be overridden, with turns, their reasoning and the other text::

        @pytest.fixture
        def examples(self):
            return (("<think>17 + 25</think>It is 42.", "17 + 25", "It is 42."),)
    """

    kind = "reasoning_parsers"


class RewardSuite(PartSuite):
    """
    The conformance suite of rewards. Must be overridden::

        @pytest.fixture
        def examples(self):
            return (
                RewardExample(answer="It is 42.", ground_truth="42", expected=1.0),
                RewardExample(answer="No idea.", ground_truth="42", expected=0.0),
            )
    """

    kind = "rewards"


class RouterSuite(PartSuite):
    """The conformance suite of routers."""

    kind = "routers"


class ScorerSuite(PartSuite):
    """
    The conformance suite of scorers. It needs `turnwise-grpo-trainer[train]`.

    The scorer serves a training of a tiny policy with a tokenizer of bytes, in the folder `policy` of `tmp_path`. It
    gets a step of episodes without any reward.
    """

    kind = "scorers"


class TaskSourceSuite(PartSuite):
    """
    The conformance suite of task sources. Must be overridden::

        @pytest.fixture
        def examples(self):
            return (
                TaskSourceExample(text="small?size=20", num_rows=20),
                TaskSourceExample(text="tiny", error="known: small, large"),
            )
    """

    kind = "task_sources"


class ToolSuite(PartSuite):
    """
    The conformance suite of tools and sets of tools. Must be overridden::

        @pytest.fixture
        def examples(self):
            return (ToolExample(arguments={"a": 2, "b": 3}, text="5"),)
    """

    kind = "tools"


class WeightTransportSuite(PartSuite):
    """The conformance suite of weight transports, both ends in one process; the fixture `probe` has the weights."""

    kind = "weight_transports"


class WorkspaceSuite(PartSuite):
    """
    The conformance suite of backends of workspaces. May be overridden::

        @pytest.fixture
        def examples(self):
            return (WorkspaceExample(spec=WorkspaceSpec(image="my-image"), leftovers=list_my_machines),)
    """

    kind = "workspaces"
