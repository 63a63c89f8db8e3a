"""The models that an agent names: the policy, the policy without training, or a model of another server."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final, Literal, get_args
from urllib.parse import urlsplit

from attrs import Attribute, field, frozen, validators

Role = Literal["policy", "untrained", "refuse"]
ROLES: Final = frozenset(get_args(Role))


@frozen(kw_only=True)
class Endpoint:
    """
    A server with another model, such as a judge or a cheaper assistant.

    Attributes:
        base_url: with the version, such as `https://api.openai.com/v1`. The rest of the agent's path is appended, such
            as `chat/completions`, so the server must know the dialect that the agent speaks.
        model: name of the model there; None sends the name that the agent sent.
        api_key_env: environment variable of the worker with the key; None sends no key. Agents do not see it.
        timeout_s: seconds for a whole response.
    """

    base_url: str = field()
    model: str | None = None
    api_key_env: str | None = None
    timeout_s: float = field(default=600.0, validator=validators.gt(0.0))

    @base_url.validator
    def _check_base_url(self, attribute: Attribute[str], value: str) -> None:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{attribute.name}' must be a URL with http or https: {value!r}")
        if parts.password or parts.username:
            raise ValueError(f"'{attribute.name}' must not contain a password: use api_key_env")


Models = Mapping[str, Role | Endpoint]
"""What serves each name; a name may have the wildcards of `fnmatch`."""


def find_model(models: Models, name: str) -> Role | Endpoint | None:
    """Return the entry of a name: its own, or else the first pattern's; None when it has none."""
    if name in models:
        return models[name]
    return next((use for pattern, use in models.items() if fnmatchcase(name, pattern)), None)


def is_pattern(name: str) -> bool:
    """Return whether a name has wildcards."""
    return any(letter in name for letter in "*?[")
