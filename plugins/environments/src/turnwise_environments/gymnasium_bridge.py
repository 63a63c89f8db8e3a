"""The environment `gymnasium`: environments of Gymnasium whose observations and actions a model can read and write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from turnwise import Task
from turnwise.errors import ConfigError
from turnwise_environments.protocol import Action, Observation

_COLORED = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumEnvironment:
    """
    An environment of Gymnasium. Override `describe` and `read` for spaces that need other words.

    Args:
        id: registered id, such as `FrozenLake-v1`; `module:Name-v0` imports the module first.
        make: more arguments of `gymnasium.make`.
        actions: word to action; by default the numbers of a `Discrete` space. A `Text` space takes the turn itself, and
            any other space a JSON value.
        pattern: regular expression that finds the action in a turn, in its first group if it has one; the last match
            counts. By default the action is the last of the words in `actions`.
        observe: `render` shows the environment's own text (render mode `ansi`), `value` the observation; `auto` prefers
            `render`.
        instructions: text before the first observation.
        invalid_reward: of a turn without an action, which is no step of the environment.
        repeatable: whether the environment draws all its luck from the seed.

    Raises:
        ConfigError: no such environment, or words for actions that it does not have.
    """

    def __init__(  # noqa: PLR0913 - a keyword for each option of the config
        self,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        actions: Mapping[str, Any] | None = None,
        pattern: str = "",
        observe: Literal["auto", "render", "value"] = "auto",
        instructions: str = "",
        invalid_reward: float = 0.0,
        repeatable: bool = True,
    ) -> None:
        self.repeatable = repeatable
        self._instructions, self._invalid_reward = instructions, invalid_reward
        self._pattern = re.compile(pattern, re.IGNORECASE) if pattern else None
        self._env = _make(id, dict(make or {}), observe)
        self._renders = self._env.render_mode == "ansi"
        self._words = self._read_words(actions)

    def reset(self, task: Task, seed: int) -> Observation:
        """Start with a seed."""
        observation, info = self._env.reset(seed=seed)
        parts = (self._instructions, self.describe(observation, info))
        return Observation(text="\n\n".join(part for part in parts if part))

    def step(self, action: Action) -> Observation:
        """Take the step that a turn names, or list the actions."""
        try:
            value = self.read(action if isinstance(action, str) else "")
        except ValueError as error:
            return Observation(text=str(error), reward=self._invalid_reward, metrics={"invalid_actions": 1})
        observation, reward, terminated, truncated, info = self._env.step(value)
        text = self.describe(observation, info)
        return Observation(text=text, reward=float(reward), done=terminated, truncated=truncated)

    def close(self) -> None:
        """Close the environment of Gymnasium."""
        self._env.close()

    def describe(self, observation: object, info: Mapping[str, object]) -> str:
        """
        Return an observation as text.

        Args:
            observation: of the environment's observation space.
            info: further values of the environment.
        """
        if self._renders:
            # Colors mark the place of the player, so they become brackets.
            return _ESCAPE.sub("", _COLORED.sub(r"[\1]", str(self._env.render()))).strip("\n")
        if isinstance(observation, str):
            return observation
        return json.dumps(observation, default=_plain)

    def read(self, text: str) -> Any:
        """Return the action that a turn names; `ValueError` with a text for the model when it names none."""
        if self._pattern is not None:
            found = list(self._pattern.finditer(text))
            if not found:
                raise ValueError(f"No action was found. {self._expected()}")
            text = found[-1][1 if self._pattern.groups else 0] or ""
        space = self._env.action_space
        if self._words:
            return self._words[self._last_word(text)]
        if isinstance(space, spaces.Text):
            action: object = text.strip()
        else:
            try:
                action = json.loads(text)
                action = np.asarray(action, space.dtype) if isinstance(space, spaces.Box) else action
            except (ValueError, TypeError, RecursionError):
                raise ValueError(f"The action is not JSON. {self._expected()}") from None
        if not space.contains(action):
            raise ValueError(f"This is no action. {self._expected()}")
        return action

    def _last_word(self, text: str) -> str:
        """Return the word of an action that ends last in a text, and the longest of these."""
        best = max(
            ((found.end(), len(word), word) for word in self._words for found in _find_word(word, text)), default=None
        )
        if best is None:
            raise ValueError(f"No action was found. {self._expected()}")
        return best[2]

    def _expected(self) -> str:
        if self._words:
            return f"The actions are: {', '.join(self._words)}."
        return f"An action is one of {self._env.action_space}."

    def _read_words(self, actions: Mapping[str, object] | None) -> dict[str, Any]:
        space = self._env.action_space
        if actions is None:
            if not isinstance(space, spaces.Discrete):
                return {}
            start = int(space.start)
            return {str(start + number): start + number for number in range(int(space.n))}
        words = {str(word): tuple(value) if isinstance(value, list) else value for word, value in actions.items()}
        for word, value in words.items():
            if not space.contains(value):
                raise ConfigError(f"the action {word!r} means {value!r}, which is not in {space}")
        return words


def _make(name: str, arguments: dict[str, Any], observe: str) -> gymnasium.Env[Any, Any]:
    if observe not in ("auto", "render", "value"):
        raise ConfigError(f"observe must be auto, render or value, not {observe!r}")
    try:
        env: gymnasium.Env[Any, Any] = gymnasium.make(name, **arguments)
        can_render = "ansi" in (env.metadata.get("render_modes") or ())
        if observe == "value" or "render_mode" in arguments or (observe == "auto" and not can_render):
            return env
        if not can_render:
            raise ConfigError(f"the environment {name} cannot render text: its modes have no 'ansi'")
        env.close()
        return gymnasium.make(name, **arguments, render_mode="ansi")
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"Gymnasium cannot make {name!r}: {error}") from error


def _find_word(word: str, text: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _plain(value: object) -> Any:
    """Return numpy values as JSON has them."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
