"""The agent of `turnwise gateway serve`: an episode is a session that somebody opened at the control port."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import attrs
from attrs import define, field, frozen

from turnwise import Episode, Resources, RunConfig, State
from turnwise.errors import DataError, PromptTooLongError
from turnwise.plugin.host import Host
from turnwise.types import Capabilities
from turnwise_gateway.agents.agent import build_parts, check_grammars
from turnwise_gateway.agents.reported import check_turns, note_score
from turnwise_gateway.agents.watch import wait_for_agent
from turnwise_gateway.config import AGENT_NAME, AgentLimits
from turnwise_gateway.serving.session_service import SessionService
from turnwise_gateway.session.comparison import check_conversations
from turnwise_gateway.session.parts import SessionParts

SERVED_NAME: Final = "gateway_session"
START_S: Final = 300.0
IDLE_S: Final = 3600.0
_LIMITS: Final = frozenset({"start_s", "idle_s"})


@frozen(kw_only=True)
class ServedConfig(AgentLimits):
    """
    The rules and limits of the sessions that are served.

    Attributes:
        start_s: seconds until the first call, after which a session is timed out: whoever opened it may have gone.
        idle_s: seconds without a call after which a session is timed out, because its agent may have died.
    """

    start_s: float | None = START_S
    idle_s: float | None = IDLE_S


def add_served_agent(config: RunConfig, host: Host, service: SessionService) -> RunConfig:
    """
    Return the config with sessions as its agent, and without a reward the reward `reported`.

    The options of an agent `external` are kept, but for options that start or find an agent. Another agent is left out.
    """
    options = _options(config)
    with host.registry("agents").owned_by("gateway"):
        host.registry("agents").add(
            SERVED_NAME, lambda made, resources: ServedAgent(made, resources, service), config=ServedConfig
        )
    agent = attrs.evolve(config.agent, name=SERVED_NAME, options=options)
    reward = config.reward or attrs.evolve(config.agent, name="reported", options={})
    return attrs.evolve(config, agent=agent, reward=reward)


def model_name(config: RunConfig) -> str:
    """Return the name of the model for agents."""
    return str(_options(config).get("model", ServedConfig().model))


def _options(config: RunConfig) -> dict[str, Any]:
    """Return the options of the config's agent for sessions; none when it is another agent than `external`."""
    names = {item.name for item in attrs.fields(ServedConfig)}
    given: Mapping[str, object] = config.agent.options if config.agent.name == AGENT_NAME else {}
    return {name: value for name, value in given.items() if name in names and not (name in _LIMITS and value is None)}


@define(eq=False)
class ServedAgent:
    """
    Serves a session for each episode. One object serves many episodes at once.

    Args:
        config: the rules of the sessions.
        resources: the chat template, and perhaps a tool parser and a reasoning parser.
        service: knows the requests for sessions.

    Raises:
        ConfigError: the run has no chat template.
    """

    config: ServedConfig
    resources: Resources
    service: SessionService
    parts: SessionParts = field(init=False)

    resumable = False

    def __attrs_post_init__(self) -> None:
        self.parts = build_parts(self.config, self.resources)

    def check_engine(self, capabilities: Capabilities) -> None:
        check_grammars(self.config, capabilities)

    async def step(self, episode: Episode) -> State:
        failure: Exception | None = None
        async with asyncio.TaskGroup() as calls:
            with self.service.open(episode, self.parts, calls) as served:
                try:
                    await wait_for_agent(served.wait(), served.session, self.config)
                except Exception as error:  # noqa: BLE001 - raised below: a task group would hide its class, and its owner
                    failure = error
                finally:  # also when a limit has ended it
                    served.close()
                    failure = failure or served.session.error  # a listener may fail at the end
                    note_score(served.session, served.reported_score(), served.scores.metrics)
        await check_conversations(served.session.book)
        if isinstance(failure, PromptTooLongError):  # by its own name it would end the run, and with it all sessions
            raise DataError(str(failure)) from failure
        if failure is not None:
            raise failure
        check_turns(served.session)
        return State.TERMINATED
