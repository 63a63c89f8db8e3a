"""Options of a session."""

from __future__ import annotations

import re
from typing import Final, Literal

from attrs import Attribute, field, frozen, validators

from turnwise_gateway.models import Endpoint, Models, Role, find_model

_HOST: Final = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
Kind = Literal["main", "subagent", "compaction", "auxiliary", "sibling"]
"""The kind of a record: the task itself, a delegated part of it, a summary, a side call, or another continuation."""


@frozen(kw_only=True)
class TrainedKinds:
    """The kinds of records whose tokens enter the loss; a sibling is trained like the record that it branched from."""

    main: bool = True
    subagent: bool = True
    compaction: bool = True
    auxiliary: bool = False


UNTRAINED: Final = TrainedKinds(main=False, subagent=False, compaction=False, auxiliary=False)


@frozen(kw_only=True)
class SessionOptions:
    """
    Rules and limits of a session.

    Attributes:
        model: name of the policy, for the agent and for replies.
        models: other names that the agent sends, with `*` and `?` as wildcards: `policy` serves and trains the policy;
            `untrained` serves it too, in records apart that are never trained; `refuse` refuses the call; and a section
            with `base_url` passes the call on to another server. A name that is not listed means the policy.
        history: `record` keeps what was sampled as the context, also when the client drops a part of it, such as
            reasoning; `template` renders what the client sends, and opens a new record when that differs.
        mid_system: system messages after the first message: `user` gives them the role of the user, `keep` leaves them
            to the chat template, `refuse` refuses the call.
        malformed_calls: a turn with a tool call that cannot be read: `call` gives the agent a call whose arguments are
            the sampled text, so that the agent tells the model about the error as about any wrong arguments, and
            streams have arguments while they are sampled; `text` gives it the turn as its text, which ends most agents,
            and streams have calls at the end of their turn.
        structured_output: a request for a JSON reply, for one named tool or for some of the tools: `refuse` refuses the
            call; `wish` serves it like a request for any reply, so the agent must check the reply; `constrain` keeps
            the sampling to a grammar of the form, with an engine that has grammars, and the turn is not trained.
        finish_left_calls: when the client of a call leaves before its turn is sampled, sample it to its end and give it
            to the retry that the libraries of OpenAI and Anthropic mark as one. Otherwise the sampling ends, and turns
            that take longer than the client's timeout are never learned.
        picture_hosts: servers whose pictures are fetched when an agent sends their URLs, such as `images.example.com`
            or `127.0.0.1:8080`; without any, nothing is fetched. No redirect is followed.
        train: kinds of records to train.
        max_calls: most calls that a session answers.
        max_tool_calls: most calls of the run's tools; further ones return an error.
        max_tool_response_length: most characters of a tool's response, the mark of truncation included.
    """

    model: str = "policy"
    models: Models = field(factory=dict)
    history: Literal["record", "template"] = field(default="record", validator=validators.in_(("record", "template")))
    mid_system: Literal["user", "keep", "refuse"] = field(
        default="user", validator=validators.in_(("user", "keep", "refuse"))
    )
    malformed_calls: Literal["text", "call"] = field(default="call", validator=validators.in_(("text", "call")))
    structured_output: Literal["refuse", "wish", "constrain"] = field(
        default="refuse", validator=validators.in_(("refuse", "wish", "constrain"))
    )
    finish_left_calls: bool = False
    picture_hosts: tuple[str, ...] = field(default=())
    train: TrainedKinds = field(factory=TrainedKinds)
    max_calls: int = field(default=500, validator=validators.ge(1))
    max_tool_calls: int = field(default=500, validator=validators.ge(0))
    max_tool_response_length: int = field(default=16_384, validator=validators.ge(1))

    @picture_hosts.validator
    def _check_hosts(self, _attribute: Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
        wrong = next((each for each in value if not _HOST.fullmatch(each)), None)
        if wrong is not None:
            raise ValueError(f"'picture_hosts' has {wrong!r}, which is no host in small letters, perhaps with a port")

    @models.validator
    def _check_models(self, _attribute: Attribute[Models], value: Models) -> None:
        if (use := value.get(self.model)) not in (None, "policy"):
            raise ValueError(f"'models.{self.model}' must be policy, because it is the option model: {use!r}")

    @property
    def has_endpoints(self) -> bool:
        """Whether other servers have some of the models."""
        return any(isinstance(use, Endpoint) for use in self.models.values())

    def find_model(self, name: str) -> Role | Endpoint:
        """Return the model of a name that an agent sends."""
        return "policy" if name in ("", self.model) else find_model(self.models, name) or "policy"

    def untrained_name(self, name: str) -> str:
        """Return the name of a model that is not trained; an empty one for the policy in training."""
        return name if self.find_model(name) == "untrained" else ""

    def knows_model(self, name: str) -> bool:
        """Return whether the options say what a name means."""
        return name in ("", self.model) or find_model(self.models, name) is not None
