"""The formats of tool calls, a module for each."""

from __future__ import annotations

from typing import Final

from turnwise_tool_formats.hermes import Hermes
from turnwise_tool_formats.turn import Grammar
from turnwise_tool_parsers.formats.deepseek_v3 import DeepSeekV3
from turnwise_tool_parsers.formats.glm45 import Glm45
from turnwise_tool_parsers.formats.gpt_oss import GptOss
from turnwise_tool_parsers.formats.granite import Granite
from turnwise_tool_parsers.formats.kimi_k2 import KimiK2
from turnwise_tool_parsers.formats.llama3_json import Llama3Json
from turnwise_tool_parsers.formats.llama4_pythonic import Llama4Pythonic
from turnwise_tool_parsers.formats.mistral import Mistral
from turnwise_tool_parsers.formats.phi4 import Phi4
from turnwise_tool_parsers.formats.qwen3_coder import Qwen3Coder

FORMATS: Final[tuple[type[Grammar], ...]] = (
    Hermes,
    Llama3Json,
    Llama4Pythonic,
    Qwen3Coder,
    Mistral,
    DeepSeekV3,
    Glm45,
    KimiK2,
    GptOss,
    Granite,
    Phi4,
)
"""Every format that has a parser."""
