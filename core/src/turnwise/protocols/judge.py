"""The contract of judges: second models that rewards ask. Import `Judge` from `turnwise.protocols` or `turnwise`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from turnwise.types import GenerateResult, Message, SamplingParams, TokenArray


@runtime_checkable
class Judge(Protocol):
    """
    A model that is asked about episodes, such as a judge or a generative reward model: `turnwise.Resources.judge`.

    Its requests are routed over replicas of their own. Who asks has to be async, and may ask many times at once.
    """

    async def generate(self, token_ids: TokenArray, sampling: SamplingParams | None = None) -> GenerateResult:
        """
        Continue a context.

        Args:
            token_ids: (n,) ids of the judge's own vocabulary.
            sampling: in place of the config's `judge.sampling`. Without a seed one is derived from the run's seed and
                what is asked, so that the same question has the same answer wherever and whenever it is asked.

        Raises:
            InfrastructureError: no replica of the judge is left: the answer says nothing about the episode.
            EngineError: the request cannot be served, such as a context that is too long.
        """

    async def ask(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> str:
        """
        Return the text of the judge's answer to a conversation, rendered by its own chat template.

        Args:
            messages: at least one, the last one not the judge's own.
            sampling: as in `generate`; the template's end-of-turn ids are added.

        Raises:
            ConfigError: the judge has no model directory, and so no chat template.
            InfrastructureError, EngineError: as in `generate`.
        """
