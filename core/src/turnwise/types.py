"""
Frozen data that crosses every border of turnwise: tasks, messages, requests, results, scores, faults.

Nothing here imports a tensor library: only these types and `turnwise.Trajectory` travel between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from attrs import field, frozen, validators
from numpy.typing import ArrayLike

from turnwise.arrays import Array as Array
from turnwise.arrays import FloatArray as FloatArray
from turnwise.arrays import TokenArray as TokenArray
from turnwise.arrays import as_float_array as as_float_array
from turnwise.arrays import as_token_array as as_token_array
from turnwise.errors import ConfigError, Owner
from turnwise.layout import Layout
from turnwise.media import MediaTokens as MediaTokens
from turnwise.media import Picture as Picture
from turnwise.media import PlacedPicture as PlacedPicture
from turnwise.recipe import PluginPin as PluginPin
from turnwise.recipe import PluginRecipe as PluginRecipe
from turnwise.report import Report
from turnwise.sampling import Grammar as Grammar
from turnwise.sampling import SamplingParams as SamplingParams

JsonObject = Mapping[str, object]
"""A JSON object to read: text keys, and JSON values that a reader checks before it uses them."""
JsonDict = dict[str, object]
Message = Mapping[str, Any]
"""One chat message in the OpenAI form: `role`, `content`, and for assistants perhaps `tool_calls`."""
ToolSchema = Mapping[str, Any]
"""The schema of a tool in the OpenAI form: `type`, and `function` with `name`, `description` and `parameters`."""


def copy_json(value: object) -> Any:
    """Return JSON values in new containers; any other value is returned unchanged."""
    if not isinstance(value, (dict, list)):
        return value
    copied: Any = value.copy()
    for key, item in copied.items() if isinstance(copied, dict) else enumerate(copied):
        if isinstance(item, (dict, list)):
            copied[key] = copy_json(item)
    return copied


class State(StrEnum):
    """The common states of agents, which may name more, as plain strings; only `TERMINATED` ends an episode."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class Status(StrEnum):
    """How an episode ended. Every episode has one; none is lost."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    TIMED_OUT = "timed_out"
    ABORTED = "aborted"
    FAILED = "failed"


class FinishReason(StrEnum):
    """
    Why an engine stopped: a stop token or string, the token limit, or an abort.

    A member says in its definition all that callers may ask, so that a new one cannot be forgotten in their code.

    Attributes:
        is_final: the request has ended; otherwise it is sent again, behind the tokens that it has sampled.
        is_cut: a limit of tokens ended the turn, and the model had more to say.
        has_stop: a stop token or a stop string ended the turn, and `GenerateResult.stop_reason` names it.
    """

    _value_: str
    is_final: bool
    is_cut: bool
    has_stop: bool

    STOP = "stop", True, False, True
    LENGTH = "length", True, True, False
    ABORT = "abort", False, False, False

    if not TYPE_CHECKING:  # mypy would ask for all arguments where a reason is looked up by its value

        def __new__(cls, value: str, is_final: bool, is_cut: bool, has_stop: bool) -> FinishReason:
            member = str.__new__(cls, value)
            member._value_, member.is_final, member.is_cut, member.has_stop = value, is_final, is_cut, has_stop
            return member


@frozen(kw_only=True)
class Task:
    """
    One row of the data set.

    Attributes:
        messages: the conversation so far, at least one message.
        uid: stable name of the row; the episodes of one group share it.
        sample_index: place of the row in the data set, from 0.
        agent_name: of the agent that runs it; empty means the config's default.
        ground_truth: value for the reward to compare with; any JSON value.
        data_source: name of the data set that the row came from.
        extra: every other column of the row, as JSON values.
    """

    messages: tuple[Message, ...] = field(validator=validators.instance_of((tuple, list)))
    uid: str = field(validator=validators.and_(validators.instance_of(str), validators.min_len(1)))
    sample_index: int = 0
    agent_name: str = ""
    ground_truth: Any = None
    data_source: str = ""
    extra: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True, eq=False)
class GenerateRequest:
    """
    A request to an engine to continue some ids.

    Attributes:
        request_id: unique in the run; `Engine.abort` takes it.
        trajectory_id: of the record that the ids belong to, which only grows. Further records and paths of an episode
            have its id, a slash and a suffix; routers use only the part before the slash.
        token_ids: (num_tokens,) int32, the whole context, never empty.
        sampling: with `max_tokens` and `stop_token_ids` filled in.
        group_id: the task's `uid`; requests of one group share a prompt prefix.
        layout: places of the paths of a forked record, for an engine with `layouts`; None is plain text.
        on_tokens: an engine may call it on the event loop with ids as it samples them; the result has all of them.
        grammar: of the turn, for an engine with `grammars`.
        pictures: in `token_ids`, in their order, for an engine with `pictures`.
    """

    request_id: str
    trajectory_id: str
    token_ids: TokenArray = field(converter=as_token_array)
    sampling: SamplingParams
    group_id: str = ""
    layout: Layout | None = None
    on_tokens: Callable[[Sequence[int]], object] | None = None
    grammar: Grammar | None = None
    pictures: tuple[PlacedPicture, ...] = ()


@frozen(kw_only=True, eq=False)
class GenerateResult:
    """
    The result of a request to an engine.

    Attributes:
        token_ids: (num_new,) int32, as sampled; a stop token is included.
        logprobs: (num_new,) float32, of each id under the distribution it was drawn from.
        finish_reason: stop, length or abort; an aborted request returns the tokens sampled so far.
        weight_version: of the weights that sampled the tokens: one for all, or (num_new,) int32 if it changed.
        stop_reason: the stop id or string that ended the turn, when there was one.
        num_cached_tokens: tokens of the context that came from a prefix cache.
        replica: index of the replica that served the request; an engine leaves it at 0.
        columns: values of open columns by name: (num_new, *shape), or for a column of all tokens perhaps those of the
            context and of the new tokens; see `turnwise.record.column_specs`. None for none.
    """

    token_ids: TokenArray = field(converter=as_token_array)
    logprobs: FloatArray = field(converter=as_float_array)
    finish_reason: FinishReason
    weight_version: int | TokenArray = 0
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    replica: int = 0
    columns: Mapping[str, Array] | None = None

    def __attrs_post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probabilities")


@frozen(kw_only=True)
class Capabilities:
    """
    The capabilities of an engine, as plain data that can be sent to other processes.

    Attributes:
        logprobs: results carry the log-probability of each sampled id.
        seeds: a request's seed makes its output repeatable.
        stop_strings: the engine supports `SamplingParams.stop`.
        abort: `Engine.abort` ends a request early, and the request returns the tokens sampled so far.
        layouts, grammars, pictures: requests may carry a fork layout (parallel paths), a grammar, or pictures.
        weight_updates, adapter_updates: `Engine.update_weights` works, and accepts LoRA adapters too.
        sleep_levels: levels that `Engine.sleep` accepts.
        max_context, vocab_size: most tokens of context and output together, and the number of ids; None when unknown.
        sampling_options: names that `SamplingParams.extra` may have.
        refused_options: other names that it could have, with the reason why the engine refuses them.
        columns: names of the open columns that its results have.
    """

    logprobs: bool = True
    seeds: bool = False
    stop_strings: bool = False
    abort: bool = False
    layouts: bool = False
    weight_updates: bool = False
    adapter_updates: bool = False
    grammars: bool = False
    pictures: bool = False
    sleep_levels: frozenset[int] = frozenset()
    max_context: int | None = None
    vocab_size: int | None = None
    sampling_options: frozenset[str] = frozenset()
    refused_options: Mapping[str, str] = field(factory=dict, hash=False)
    columns: frozenset[str] = frozenset()

    def check_extra(self, sampling: SamplingParams) -> None:
        """Raise `ConfigError` with the first option of `SamplingParams.extra` that the engine refuses."""
        if refused := [name for name in sampling.extra if name not in self.sampling_options]:
            known = ", ".join(sorted(self.sampling_options)) or "none"
            reason = self.refused_options.get(refused[0]) or f"the engine does not know this option; it knows {known}"
            raise ConfigError(f"sampling.extra.{refused[0]}: {reason}")


@frozen(kw_only=True)
class ToolCall:
    """
    One call that a parser found in a turn.

    Attributes:
        name: of the tool; empty when it could not be read.
        arguments: its JSON object; empty when malformed.
        error: the reason why the call cannot run, as a text for the model; empty for a good call.
        raw, id: the text between the tags, and the id, both as sampled; None if the model wrote no id.
    """

    name: str = ""
    arguments: Mapping[str, Any] = field(factory=dict)
    error: str = ""
    raw: str = ""
    id: str | None = None


def _as_places(places: Iterable[int]) -> tuple[int, ...]:
    return tuple(places)


@frozen(kw_only=True)
class ToolResult:
    """
    The result of a tool call.

    Attributes:
        text: for the model.
        reward: of the call, if the tool gives rewards.
        metrics: numbers for the logs, such as counts and seconds: the sum over an episode's calls is logged.
        error: the call failed, and `text` gives the reason; the model may try again.
        pictures: that the model sees; an episode fails where the agent or the chat takes none.
        picture_places: number of characters of `text` in front of each picture, ascending; pictures without a place,
            and those with a place behind the end of the text, are behind the text. `turnwise.showing` has functions
            that make, read, change and cut such results.
        report: for people who look at the episode; the model does not read it.
        ends_episode: the agent ends the episode, completed, when all calls of the turn have their results. The model
            reads none of them.
    """

    text: str
    reward: float | None = None
    metrics: Mapping[str, float] = field(factory=dict)
    error: bool = False
    pictures: tuple[Picture, ...] = ()
    picture_places: tuple[int, ...] = field(default=(), converter=_as_places)
    report: Report | None = None
    ends_episode: bool = False


@frozen(kw_only=True)
class Reply:
    """
    A reply of a simulated user.

    Attributes:
        content: text of the user message.
        should_terminate: the conversation is over; the model does not see `content`.
        reward: of the turn, if the simulator gives rewards.
    """

    content: str = ""
    should_terminate: bool = False
    reward: float | None = None


Columns = Mapping[str, ArrayLike]
_COLUMNS: Any = field(default=None, eq=False, repr=False)


class Placement(StrEnum):
    """The token that gets the score of a trajectory."""

    LAST_ACTION = "last_action"
    LAST_TOKEN = "last_token"


@frozen(kw_only=True)
class TrajectoryScore:
    """
    One number for a whole trajectory, set on its last action token unless `at` says otherwise.

    A score of any class may have `columns`: values of open columns of its record by name, see `Trajectory.with_column`.
    The core puts them into the record, and the score keeps none.
    """

    value: float
    at: Placement = field(default=Placement.LAST_ACTION, converter=Placement)
    extra: Mapping[str, float] = field(factory=dict)
    columns: Columns | None = _COLUMNS


@frozen(kw_only=True)
class TurnScore:
    """One number per turn of the model, set on its last action, or on the action before a constrained turn."""

    values: tuple[float, ...]
    extra: Mapping[str, float] = field(factory=dict)
    columns: Columns | None = _COLUMNS


@frozen(kw_only=True)
class TokenScore:
    """One number per response token; 0 on all tokens that are no actions."""

    values: tuple[float, ...]
    extra: Mapping[str, float] = field(factory=dict)
    columns: Columns | None = _COLUMNS


Score = TrajectoryScore | TurnScore | TokenScore


@frozen(kw_only=True)
class Fault:
    """
    The reason why an episode failed, timed out or was interrupted.

    Attributes:
        owner: of the code or machine at fault.
        kind, message, traceback: the exception's class name, one line, and the frames for the log.
    """

    owner: Owner
    kind: str
    message: str
    traceback: str = ""


@frozen(kw_only=True)
class EpisodeMetrics:
    """
    Counts and times of one episode; times are wall-clock seconds and differ from run to run.

    Attributes:
        total_s: from the first step to the end, reward included.
        llm_s, tool_s, reward_s: in generate calls, in tool calls (parallel calls add up), and in the reward.
        num_turns: unbroken runs of sampled tokens in its records, as in a batch; one may have several requests.
        num_tool_calls, num_tool_errors: all tool calls, malformed ones included, and the ones that ended in an error.
        num_tokens: by origin: prompt, action, observation, forced; also replayed and constrained if there are any.
        mask_ratio: action tokens over response tokens.
        tool_reward: sum of the tools' rewards.
        num_cached_tokens: context tokens that came from a prefix cache.
        replicas: indexes of the replicas that sampled its turns, in the order of their first turn.
        extra: sums of `Episode.record_metric` by name, and of the tools' metrics by `tool/` and name.
    """

    total_s: float = 0.0
    llm_s: float = 0.0
    tool_s: float = 0.0
    reward_s: float = 0.0
    num_turns: int = 0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_tokens: Mapping[str, int] = field(factory=dict)
    mask_ratio: float = 0.0
    tool_reward: float = 0.0
    num_cached_tokens: int = 0
    replicas: tuple[int, ...] = ()
    extra: Mapping[str, float] = field(factory=dict)
