"""The two rings of packages: those that their users can rely on, and all others."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PROMISED: Final = frozenset(
    {
        "chat_templates",
        "commands",
        "core",
        "gateway",
        "grpo_trainer",
        "hermes_parser",
        "openai_engine",
        "parallel_thinking",
        "python_sandbox",
        "result_files",
        "routers",
        "sglang_engine",
        "single_turn",
        "task_files",
        "testing",
        "tool_agent",
        "tool_parsers",
        "torl_python",
        "transformers_engine",
        "vllm_engine",
    }
)
"""Folders of the promised packages, also of those to come."""
RINGS: Final = {
    "Promised": """\
The names that their pages and docstrings document stay. A change that breaks their users has an entry under "Breaking
changes" in the changelog.""",
    "Experimental": "They work and have tests, but any release may change or remove what they offer.",
}
"""The meaning of each ring, for the page."""


def ring_of(folder: Path) -> str:
    """Return the ring of the package in a folder."""
    return "Promised" if folder.name in PROMISED else "Experimental"
