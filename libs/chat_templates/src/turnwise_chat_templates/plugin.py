"""Registers the chat `jinja`."""

from __future__ import annotations

from attrs import field, frozen, validators

from turnwise import Registry, Resources, hookimpl
from turnwise.options import SpecialTokenPolicy
from turnwise.protocols import Chat


@frozen(kw_only=True)
class JinjaConfig:
    """
    Options of the chat `jinja`, which renders a model's own chat template.

    Attributes:
        special_tokens_in_content: treatment of special tokens that the messages of a task, tools or users spell:
            `text` encodes them as ordinary text, `refuse` fails the episode, and `parse` lets them act as the
            template's own.
        check_every: one episode in so many is compared with the template's rendering of its whole conversation, for
            templates with rules by length or position; 0 compares none.
    """

    special_tokens_in_content: SpecialTokenPolicy = "text"
    check_every: int = field(default=64, validator=validators.ge(0))


def make_jinja(config: JinjaConfig, resources: Resources) -> Chat:
    """Load the template of the run's model."""
    from turnwise_chat_templates.loading import load_chat  # it imports numpy and the templates

    return load_chat(resources.model, config.special_tokens_in_content, config.check_every)


@hookimpl
def register_chats(registry: Registry[Chat]) -> None:
    """Register `jinja`."""
    registry.add("jinja", make_jinja, config=JinjaConfig)
