"""The agent itself: two transitions."""

from __future__ import annotations

from turnwise import Chat, Episode, State
from turnwise.errors import ConfigError
from turnwise_single_turn.config import SingleTurnConfig


class SingleTurn:
    """
    Asks the model once; keeps nothing between episodes.

    Args:
        config: how the turn is asked for.
        chat: the chat template.

    Raises:
        ConfigError: `chat` is None.
    """

    def __init__(self, config: SingleTurnConfig, chat: Chat | None) -> None:
        if chat is None:
            raise ConfigError("agent 'single_turn' writes prompts: the run needs a model with a chat template")
        self._config = config
        self._chat = chat

    async def step(self, episode: Episode) -> State:
        """Open the record in the first step, and let the model answer in the second."""
        if episode.state == State.PENDING:
            return self._begin(episode)
        return await self._answer(episode)

    def _begin(self, episode: Episode) -> State:
        messages, system_prompt = episode.messages, self._config.system_prompt
        if system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        episode.begin(self._chat.prompt(messages))
        return State.GENERATING

    async def _answer(self, episode: Episode) -> State:
        result = await episode.generate(max_tokens=self._config.max_tokens)
        episode.messages.append({"role": "assistant", "content": self._chat.text(result.token_ids)})
        return State.TERMINATED
