"""
Special tokens that the contents of messages spell.

A tool, a user or a data set may write `<|im_end|>`. A tokenizer parses that like the template's own token, so a content
could forge the end of its message, and whole turns. The guard puts `CUT` behind the first character of such a token,
before the template renders the content; `HuggingFaceTokenizer.encode` splits a text there and leaves the cut out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final
from uuid import uuid4

from turnwise.errors import DataError
from turnwise.options import SpecialTokenPolicy

# Letters and digits pass a template unchanged. No content can spell them: they differ in every process.
CUT: Final = f"tw7cut{uuid4().hex}"
SPECIAL_TOKENS_METRIC: Final = "special_tokens_in_content"


class ContentGuard:
    """
    Treats special tokens in contents by a policy.

    A special token of one character cannot be cut and is parsed as before.

    Args:
        special_tokens: texts of the tokenizer's special tokens.
        policy: see `turnwise.options.SpecialTokenPolicy`.
    """

    def __init__(self, special_tokens: Collection[str], policy: SpecialTokenPolicy) -> None:
        tokens = [token for token in special_tokens if len(token) > 1 and policy != "parse"]
        spelled = "|".join(map(re.escape, tokens)) or "(?!)"
        self._search = re.compile(spelled).search
        # Consumes one character, so that tokens that overlap are all cut.
        self._cut = re.compile(f"(?=(?:{spelled}))(.)", re.DOTALL)
        self._refuses = policy == "refuse"

    def text(self, content: str) -> str:
        """Return a content whose special tokens are cut; `DataError` if it spells one and the policy is `refuse`."""
        found = self._search(content)
        if found is None:
            return content
        if self._refuses:
            option = "special_tokens_in_content of the chat"
            raise DataError(f"a message spells the special token {found[0]!r}; {option} decides how to treat it")
        return self._cut.sub(rf"\1{CUT}", content)

    def value(self, value: object) -> Any:
        """Return a JSON value, such as a message, with `text` applied to each of its texts, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value
