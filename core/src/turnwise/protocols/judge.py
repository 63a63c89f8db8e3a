"""The contract of judges: second models that rewards ask. Import `Judge` from `turnwise.protocols` or `turnwise`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from turnwise.types import GenerateResult, MediaTokens, Message, SamplingParams, TokenArray


@runtime_checkable
class Judge(Protocol):
    """
    A model that scores or comments on episodes, for rewards and tools: `turnwise.Resources.judge`.

    It has separate replicas. Callers must be async, and may send many requests at once.
    """

    async def generate(
        self, token_ids: TokenArray | MediaTokens, sampling: SamplingParams | None = None
    ) -> GenerateResult:
        """
        Continue a context.

        Args:
            token_ids: (n,) ids of the judge's own vocabulary, perhaps with pictures.
            sampling: replaces the config's `judge.sampling`. A missing seed is derived from the run's seed and the
                context, so that the same question has the same answer in every process.

        Raises:
            InfrastructureError: no replica of the judge is left, which is not the episode's doing.
            EngineError: the request cannot be served, such as a context that is too long.
            ConfigError: there are pictures, and the judge's engine takes none.
        """

    async def ask(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> str:
        """
        Return the text of the judge's answer to a conversation, rendered by its own chat template.

        Args:
            messages: at least one, the last one not the judge's own; pictures have the form of `turnwise.media`.
            sampling: as in `generate`; the template's end-of-turn ids are added.

        Raises:
            ConfigError: the judge has no model directory, and so no chat template; or a message has a picture, which
                the judge does not take.
            DataError: a picture cannot be used.
            InfrastructureError, EngineError: as in `generate`.
        """
