"""Registers the chats `jinja` and `harmony`."""

from __future__ import annotations

from turnwise import Registry, Resources, hookimpl
from turnwise.protocols import Chat
from turnwise_chat_templates.config import HarmonyConfig, JinjaConfig


def make_jinja(config: JinjaConfig, resources: Resources) -> Chat:
    """Load the template of the run's model."""
    from turnwise_chat_templates.loading import load_chat  # it imports numpy and the templates

    template = load_chat(
        resources.model, config.special_tokens_in_content, config.check_every, config.max_picture_pixels
    )
    if config.tools == "template":
        return template
    from turnwise_chat_templates.written_tools import WrittenToolsChat

    return WrittenToolsChat(template)


def make_harmony(config: HarmonyConfig, resources: Resources) -> Chat:
    """Load the tokenizer of the run's model."""
    from turnwise_chat_templates.harmony import HarmonyChat  # it imports numpy and the templates

    return HarmonyChat.load(resources.model, config.special_tokens_in_content, config=config)


@hookimpl
def register_chats(registry: Registry[Chat]) -> None:
    """Register `jinja` and `harmony`."""
    registry.add("jinja", make_jinja, config=JinjaConfig)
    registry.add("harmony", make_harmony, config=HarmonyConfig)
