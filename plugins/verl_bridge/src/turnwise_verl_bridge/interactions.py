"""verl's interactions (`BaseInteraction`), from the YAML file of `interaction_config_path`, as a simulated user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from attrs import frozen

from turnwise import Message, Reply, Task
from turnwise.errors import ConfigError, DataError
from turnwise_verl_bridge.class_files import Section, accepted, make, read_sections, task_options, with_ground_truth
from turnwise_verl_bridge.config import VerlInteractionConfig


def build_interaction(config: VerlInteractionConfig) -> VerlInteraction:
    """Return the interactions of a file as one user; `ConfigError` when one is not usable."""
    found: dict[str, object] = {}
    for section in read_sections(config.file, "interaction"):
        name = _name_of(section)
        if name in found:
            raise ConfigError(f"{section.place}: two interactions are named {name!r}")
        found[name] = make(section, config.modules, config={**section.config, "name": name})
    return VerlInteraction(found)


def _name_of(section: Section) -> str:
    """Return the name of an interaction; verl derives a missing one from the class."""
    name = section.rest.get("name")
    if name is None:
        return section.class_name.rpartition(".")[2].removesuffix("Interaction").lower()
    if not isinstance(name, str):
        raise ConfigError(f"{section.place}.name: expected a text, got {name!r}")
    return name


@frozen
class VerlSession:
    """The instance of an episode, the interaction that has it, and the task's `interaction_kwargs`."""

    instance_id: str
    interaction: Any
    options: Mapping[str, Any]


@frozen
class VerlInteraction:
    """
    Interactions of verl by name; the `name` in a task's `interaction_kwargs` chooses one.

    Attributes:
        interactions: at least one; a single one needs no name.
    """

    interactions: Mapping[str, Any]

    async def create(self, task: Task) -> VerlSession:
        """Start an instance; `DataError` when the task names no interaction of the file."""
        options = task_options(task, "interaction_kwargs")
        name = options.get("name", next(iter(self.interactions)) if len(self.interactions) == 1 else None)
        if name not in self.interactions:
            known = ", ".join(self.interactions)
            raise DataError(f"task {task.uid}: interaction_kwargs.name is {name!r}, expected one of {known}")
        interaction = self.interactions[name]
        options = with_ground_truth(interaction.start_interaction, options, task)
        made = await interaction.start_interaction(str(uuid4()), **accepted(interaction.start_interaction, options))
        return VerlSession(str(made), interaction, options)

    async def respond(self, session: Any, messages: Sequence[Message]) -> Reply:
        """Return the response to a conversation, with its score as the turn's reward."""
        opened: VerlSession = session
        respond = opened.interaction.generate_response
        copies = [dict(message) for message in messages]
        answer = await respond(opened.instance_id, copies, **accepted(respond, opened.options))
        if not isinstance(answer, tuple) or len(answer) != 4:
            raise TypeError(f"generate_response returned {answer!r}, expected (ends, content, score, data)")
        ends, content, score, _ = answer
        return Reply(content=str(content), should_terminate=bool(ends), reward=None if score is None else float(score))

    async def release(self, session: Any) -> None:
        """End the instance; verl's base class takes no argument here, and its subclasses take the id."""
        opened: VerlSession = session
        finalize = opened.interaction.finalize_interaction
        await finalize(**accepted(finalize, {"instance_id": opened.instance_id}))
