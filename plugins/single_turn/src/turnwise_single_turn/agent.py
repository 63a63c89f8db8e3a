"""The agent `single_turn`: one transition starts the record, the next one lets the model answer."""

from __future__ import annotations

from functools import partial

from turnwise import Chat, Episode, Message, ReasoningParser, State, Task
from turnwise.errors import ConfigError
from turnwise.messages import build_turn_message, encode_beside_loop
from turnwise.protocols import PictureChat
from turnwise.types import MediaTokens, TokenArray
from turnwise_single_turn.config import SingleTurnConfig


class SingleTurn:
    """
    Requests one turn of the model. It keeps no state between episodes.

    Args:
        config: prompt and length of the turn.
        chat: renders prompts and decodes the turn.
        reasoning_parser: splits the reasoning from the answer; None leaves it there.

    Raises:
        ConfigError: `chat` is None.
    """

    def __init__(
        self, config: SingleTurnConfig, chat: Chat | None, reasoning_parser: ReasoningParser | None = None
    ) -> None:
        if chat is None:
            raise ConfigError("agent 'single_turn' writes prompts: the run needs a model with a chat template")
        self._config = config
        self._chat = chat
        self._render = chat.picture_prompt if isinstance(chat, PictureChat) else chat.prompt
        self._split = None if reasoning_parser is None else reasoning_parser.split

    async def step(self, episode: Episode) -> State:
        if episode.state == State.PENDING:
            return await self._start(episode)
        return await self._answer(episode)

    async def _start(self, episode: Episode) -> State:
        messages = episode.messages
        self._add_system_prompt(messages)
        episode.begin(await encode_beside_loop(messages, partial(self._render, messages)))
        return State.GENERATING

    def first_prompt(self, task: Task) -> TokenArray | MediaTokens:
        """Return the prompt that `step` begins with; see `turnwise.protocols.PromptingAgent`."""
        messages = list(task.messages)
        self._add_system_prompt(messages)
        return self._render(messages)

    def _add_system_prompt(self, messages: list[Message]) -> None:
        system_prompt = self._config.system_prompt
        if system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})

    async def _answer(self, episode: Episode) -> State:
        result = await episode.generate(max_tokens=self._config.max_tokens)
        content = self._chat.text(result.token_ids)
        episode.messages.append(build_turn_message(content, split=self._split))
        return State.TERMINATED
