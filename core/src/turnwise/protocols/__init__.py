"""
The contracts of the hot path: engines, parsers, tools, agents, rewards, routers and the rest.

The core finds them once by config name and calls them directly; no plugin hook runs per token or per turn. A method is
async exactly when it may wait. A class fulfils a protocol by having its methods; it need not inherit from it.
"""

from __future__ import annotations

from turnwise.protocols.adapter import Adapter as Adapter
from turnwise.protocols.agent import Agent as Agent
from turnwise.protocols.agent import EngineCheckingAgent as EngineCheckingAgent
from turnwise.protocols.agent import Episode as Episode
from turnwise.protocols.agent import PromptingAgent as PromptingAgent
from turnwise.protocols.agent import ServingAgent as ServingAgent
from turnwise.protocols.chat import CallIdChat as CallIdChat
from turnwise.protocols.chat import Chat as Chat
from turnwise.protocols.chat import CheckedChat as CheckedChat
from turnwise.protocols.chat import PictureChat as PictureChat
from turnwise.protocols.chat import Tokenizer as Tokenizer
from turnwise.protocols.chat import ToolWritingChat as ToolWritingChat
from turnwise.protocols.command import Command as Command
from turnwise.protocols.command import Diagnostic as Diagnostic
from turnwise.protocols.command import Finding as Finding
from turnwise.protocols.command import FindingState as FindingState
from turnwise.protocols.engine import Engine as Engine
from turnwise.protocols.judge import Judge as Judge
from turnwise.protocols.resources import ModelSpec as ModelSpec
from turnwise.protocols.resources import Resources as Resources
from turnwise.protocols.reward import GradingReward as GradingReward
from turnwise.protocols.reward import GroupCall as GroupCall
from turnwise.protocols.reward import GroupReward as GroupReward
from turnwise.protocols.reward import Postprocessor as Postprocessor
from turnwise.protocols.reward import Reward as Reward
from turnwise.protocols.router import ReplicaLoad as ReplicaLoad
from turnwise.protocols.router import Router as Router
from turnwise.protocols.service import Service as Service
from turnwise.protocols.service import ServiceAgent as ServiceAgent
from turnwise.protocols.service import ServiceClient as ServiceClient
from turnwise.protocols.tool import FormattedParser as FormattedParser
from turnwise.protocols.tool import Interaction as Interaction
from turnwise.protocols.tool import KeepingTool as KeepingTool
from turnwise.protocols.tool import ReasoningFormat as ReasoningFormat
from turnwise.protocols.tool import ReasoningParser as ReasoningParser
from turnwise.protocols.tool import StreamingParser as StreamingParser
from turnwise.protocols.tool import Tool as Tool
from turnwise.protocols.tool import ToolFormat as ToolFormat
from turnwise.protocols.tool import ToolParser as ToolParser
from turnwise.protocols.tool import TurnStream as TurnStream
from turnwise.protocols.weights import WeightTransport as WeightTransport
from turnwise.protocols.wrapper import RunInfo as RunInfo
from turnwise.protocols.wrapper import Wrapper as Wrapper
