"""The environment `textarena`: games of TextArena for one player (https://www.textarena.ai)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import textarena

from turnwise import Task
from turnwise.errors import ConfigError
from turnwise_environments.protocol import Action, Observation


class TextArenaEnvironment:
    """
    A game for one player. The model reads only new messages of the game, and never its own again.

    The reward comes with the end of the game, and is the one of TextArena.

    Args:
        id: registered id, such as `Wordle-v0`; wrappers of the id that format observations are removed.
        make: more arguments of `textarena.make`.

    Raises:
        ConfigError: no such game.
    """

    def __init__(self, *, id: str, make: Mapping[str, Any] | None = None) -> None:
        if id not in textarena.envs.registration.ENV_REGISTRY:
            raise ConfigError(f"TextArena has no game {id!r}; its games are in textarena.envs")
        env = textarena.make(id, **(make or {}))
        while hasattr(env, "env"):
            env = env.env
        self._env = env

    def reset(self, task: Task, seed: int) -> Observation:
        """Start the game with one player."""
        self._env.reset(num_players=1, seed=seed)
        return Observation(text=self._new_text())

    def step(self, action: Action) -> Observation:
        """Make a move with the text of a turn."""
        done, _ = self._env.step(action if isinstance(action, str) else "")
        if not done:
            return Observation(text=self._new_text())
        rewards, _ = self._env.close()
        return Observation(text=self._new_text(), reward=float((rewards or {}).get(0, 0.0)), done=True)

    def close(self) -> None:
        """Free nothing: a game is plain values."""

    def _new_text(self) -> str:
        """Return the messages of the game since the last call."""
        _, messages = self._env.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for sender, text, kind in messages if not (kind is own and sender == 0)).strip()
