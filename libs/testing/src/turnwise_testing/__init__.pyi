"""The public names of the test kit, each with its module."""

from turnwise_testing.checks.adapter import AdapterExample as AdapterExample
from turnwise_testing.checks.command import CommandExample as CommandExample
from turnwise_testing.checks.group_reward import GroupExample as GroupExample
from turnwise_testing.checks.interaction import InteractionProbe as InteractionProbe
from turnwise_testing.checks.postprocessor import PostprocessorProbe as PostprocessorProbe
from turnwise_testing.checks.reward import RewardExample as RewardExample
from turnwise_testing.checks.task_source import TaskSourceExample as TaskSourceExample
from turnwise_testing.checks.tool import ToolExample as ToolExample
from turnwise_testing.engines.bigram import BigramEngine as BigramEngine
from turnwise_testing.engines.scripted import (
    Failure as Failure,
)
from turnwise_testing.engines.scripted import (
    RandomPolicy as RandomPolicy,
)
from turnwise_testing.engines.scripted import (
    ScriptedEngine as ScriptedEngine,
)
from turnwise_testing.inputs.strategies import (
    scripts as scripts,
)
from turnwise_testing.inputs.strategies import (
    trajectories as trajectories,
)
from turnwise_testing.inputs.tokenizers import byte_tokenizer as byte_tokenizer
from turnwise_testing.probes.agent import AgentProbe as AgentProbe
from turnwise_testing.probes.engine import EngineProbe as EngineProbe
from turnwise_testing.references.reference_model import TransformersReference as TransformersReference
from turnwise_testing.suites.engine import EngineSuite as EngineSuite
from turnwise_testing.suites.environment import EnvironmentSuite as EnvironmentSuite
from turnwise_testing.suites.gateway import (
    GatewayEndpoint as GatewayEndpoint,
)
from turnwise_testing.suites.gateway import (
    GatewaySuite as GatewaySuite,
)
from turnwise_testing.suites.parser import ToolParserSuite as ToolParserSuite
from turnwise_testing.suites.parts import (
    AdapterSuite as AdapterSuite,
)
from turnwise_testing.suites.parts import (
    AdvantageSuite as AdvantageSuite,
)
from turnwise_testing.suites.parts import (
    AgentSuite as AgentSuite,
)
from turnwise_testing.suites.parts import (
    ChatSuite as ChatSuite,
)
from turnwise_testing.suites.parts import (
    ColumnSuite as ColumnSuite,
)
from turnwise_testing.suites.parts import (
    CommandSuite as CommandSuite,
)
from turnwise_testing.suites.parts import (
    DiagnosticSuite as DiagnosticSuite,
)
from turnwise_testing.suites.parts import (
    GroupRewardSuite as GroupRewardSuite,
)
from turnwise_testing.suites.parts import (
    InteractionSuite as InteractionSuite,
)
from turnwise_testing.suites.parts import (
    LossSuite as LossSuite,
)
from turnwise_testing.suites.parts import (
    MiddlewareSuite as MiddlewareSuite,
)
from turnwise_testing.suites.parts import (
    ObserverSuite as ObserverSuite,
)
from turnwise_testing.suites.parts import (
    PartSuite as PartSuite,
)
from turnwise_testing.suites.parts import (
    PostprocessorSuite as PostprocessorSuite,
)
from turnwise_testing.suites.parts import (
    ReasoningParserSuite as ReasoningParserSuite,
)
from turnwise_testing.suites.parts import (
    RewardSuite as RewardSuite,
)
from turnwise_testing.suites.parts import (
    RouterSuite as RouterSuite,
)
from turnwise_testing.suites.parts import (
    ScorerSuite as ScorerSuite,
)
from turnwise_testing.suites.parts import (
    TaskSourceSuite as TaskSourceSuite,
)
from turnwise_testing.suites.parts import (
    ToolSuite as ToolSuite,
)
from turnwise_testing.suites.parts import (
    WeightTransportSuite as WeightTransportSuite,
)
from turnwise_testing.suites.parts import (
    WorkspaceSuite as WorkspaceSuite,
)
from turnwise_testing.suites.plugin import PluginSuite as PluginSuite
from turnwise_testing.suites.wrapper import WrapperSuite as WrapperSuite
