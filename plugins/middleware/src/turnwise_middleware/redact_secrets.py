"""The middleware `redact_secrets`: removes keys, tokens and passwords from results of tools."""

from __future__ import annotations

import os
import re
from typing import Final

from attrs import evolve

from turnwise import Resources, ToolResult
from turnwise.showing import change_texts
from turnwise_middleware.config import RedactSecretsConfig
from turnwise_middleware.interception import ToolUse
from turnwise_middleware.middleware import Middleware

_PATTERNS: Final = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",  # AWS
    r"\bgh[pousr]_[A-Za-z0-9]{36,}\b",  # GitHub
    r"\bgithub_pat_[A-Za-z0-9_]{22,}\b",
    r"\bsk-[A-Za-z0-9_-]{20,}",  # OpenAI and others
    r"\bhf_[A-Za-z0-9]{30,}\b",  # Hugging Face
    r"\bxox[abprs]-[A-Za-z0-9-]{10,}",  # Slack
    r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+",  # JSON web tokens
    r"(?i)(?<=bearer )[A-Za-z0-9._~+/-]{16,}=*",
)
_SHORTEST: Final = 6
"""Characters of the shortest value of an environment variable that is a secret: `1` is everywhere."""


class RedactSecrets(Middleware):
    """Replaces secrets in the texts and reports of results, also of errors; the observation has the replacement."""

    name = "redact_secrets"
    config: RedactSecretsConfig

    def __init__(self, config: RedactSecretsConfig, resources: Resources | None = None) -> None:
        super().__init__(config, resources)
        values = [os.environ.get(name, "") for name in config.environment]
        # The longest first: a secret may contain another one.
        literals = sorted((re.escape(value) for value in values if len(value) >= _SHORTEST), key=len, reverse=True)
        self._patterns = [re.compile(each, re.DOTALL) for each in (*literals, *_PATTERNS, *config.patterns)]

    async def after_tool(self, use: ToolUse, result: ToolResult) -> ToolResult:
        """Return the result without secrets."""
        if self.config.tools and use.name not in self.config.tools:
            return result
        redacted, report = change_texts(result, self._redact), result.report
        if report is not None:
            facts = {name: self._redact(each) if isinstance(each, str) else each for name, each in report.facts.items()}
            report = evolve(report, title=self._redact(report.title), text=self._redact(report.text), facts=facts)
        if (redacted.text, report) == (result.text, result.report):
            return result
        return evolve(redacted, report=report)

    def _redact(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(lambda _found: self.config.replacement, text)
        return text
