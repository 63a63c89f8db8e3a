"""verl's servers as a turnwise engine; verl manages their weights, sleep and routing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from attrs import evolve

from turnwise.errors import ConfigError, EngineError
from turnwise.protocols import ModelSpec
from turnwise.protocols.weights import TAGS
from turnwise.types import Capabilities, FinishReason, GenerateRequest, GenerateResult, SamplingParams
from turnwise_engine_support.picture_families import supports_grids
from turnwise_moe_routes.shapes import COLUMN, RouteShape, read_shape
from turnwise_verl_bridge.config import VerlEngineConfig
from turnwise_verl_bridge.pictures import VisionRows, images_of

SAMPLING_OPTIONS = frozenset({"frequency_penalty", "presence_penalty", "repetition_penalty"})
"""Options that verl's servers take under one name, whether vLLM or SGLang runs behind them."""
_CLIENT: ContextVar[Any] = ContextVar("turnwise_verl_client")
_BUILT: ContextVar[list[VerlEngine]] = ContextVar("turnwise_verl_engines")


@contextmanager
def use_client(client: object) -> Iterator[list[VerlEngine]]:
    """
    Give engines `verl` that are built in this context a `verl.workers.rollout.llm_server.LLMServerClient`.

    The list gets these engines.
    """
    built: list[VerlEngine] = []
    token, other = _CLIENT.set(client), _BUILT.set(built)
    try:
        yield built
    finally:
        _CLIENT.reset(token)
        _BUILT.reset(other)


def build_engine(config: VerlEngineConfig, model: ModelSpec | None) -> VerlEngine:
    """Build an engine for the client of the enclosing `use_client`; `ConfigError` outside of it."""
    engine = VerlEngine(config, current_client(), model)
    _BUILT.get().append(engine)
    return engine


def current_client() -> Any:
    """Return the client of the enclosing `use_client`; raise `ConfigError` outside of it."""
    try:
        return _CLIENT.get()
    except LookupError:
        raise ConfigError("engine verl works only inside verl: choose another engine") from None


class VerlEngine:
    """
    A facade over verl's server client.

    verl manages weights and sleep. Its client cannot abort a single request: a request cancelled here runs to its end
    on verl's server.

    Attributes:
        vision: computes the fields of rows with pictures; None for a model that takes none.
    """

    def __init__(self, config: VerlEngineConfig, client: Any, model: ModelSpec | None = None) -> None:
        self._config = config
        self._routes = self._route_shape(model) if config.enable_return_routed_experts else None
        self._client = client
        path = None if model is None else model.path
        self.vision = VisionRows(path) if path is not None and supports_grids(path) else None
        self._num_running = 0
        self._stopped = False

    @property
    def capabilities(self) -> Capabilities:
        """Log-probabilities, options of sampling, and pictures; verl controls weights, sleep and aborts."""
        return Capabilities(
            pictures=self.vision is not None,
            max_context=self._config.max_context,
            sampling_options=SAMPLING_OPTIONS,
            columns=frozenset({COLUMN} if self._routes else ()),
        )

    @staticmethod
    def _route_shape(model: ModelSpec | None) -> RouteShape:
        path = None if model is None else model.path
        shape = read_shape(path)
        if shape is None:
            raise ConfigError(
                "actor_rollout_ref.rollout.enable_rollout_routing_replay needs a mixture of experts, and the"
                f" config.json of {str(path)!r} has no experts"
            )
        return shape

    async def start(self) -> None:
        """Do nothing: verl has started its servers."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Continue a context; the episode's id is the request id of verl's sticky session.

        Raises:
            EngineError: the context is empty or has no room for a token, or the output has no log-probabilities.
        """
        limit = self._config.max_context
        if self._stopped:
            raise EngineError("engine verl is stopped")
        if len(request.token_ids) == 0:
            raise EngineError(f"request {request.request_id!r} has an empty context")
        if limit is not None and len(request.token_ids) >= limit:
            raise EngineError(f"the context has {len(request.token_ids)} tokens, but max_context is {limit}")
        if request.pictures and self.vision is None:
            raise EngineError("the model of verl's servers takes no pictures")
        self._num_running += 1
        try:
            pictures = {}
            if request.pictures:
                pictures["image_data"] = await asyncio.to_thread(images_of, request.pictures)
            output = await self._client.generate(
                request_id=request.trajectory_id.partition("/")[0],
                prompt_ids=request.token_ids.tolist(),
                sampling_params=to_verl_sampling(request.sampling),
                **pictures,
            )
        finally:
            self._num_running -= 1
        result = parse_output(output, request.sampling)
        if self._routes is None:
            return result
        given = () if output.routed_experts is None else output.routed_experts
        num_tokens = len(request.token_ids) + len(result.token_ids)
        return evolve(result, columns={COLUMN: self._routes.pad(given, num_tokens, "verl")})

    async def abort(self, request_id: str) -> None:
        """Do nothing: verl's client can only abort all requests of a server."""

    async def sleep(self, level: int) -> None:
        """Raise `EngineError`: verl controls the sleep of its servers."""
        raise EngineError("engine verl cannot sleep: verl controls its servers")

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Raise `EngineError`: verl controls the sleep of its servers."""
        raise EngineError("engine verl cannot wake up: verl controls its servers")

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Raise `EngineError`: verl updates the weights of its servers."""
        raise EngineError("engine verl cannot update weights: verl controls its servers")

    def stats(self) -> Mapping[str, float]:
        """Return `num_running`: the number of requests in flight from this process."""
        return {"num_running": self._num_running}

    async def stop(self) -> None:
        """Reject further requests."""
        self._stopped = True


def to_verl_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters for verl's servers, under names that both vLLM and SGLang accept."""
    params: dict[str, object] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }
    if sampling.max_tokens is not None:
        params["max_tokens"] = sampling.max_tokens
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    return {**params, **sampling.extra}


def parse_output(output: Any, sampling: SamplingParams) -> GenerateResult:
    """
    Convert verl's `TokenOutput`.

    verl reports `completed` both for a stop token and for the length limit; the last token distinguishes them.

    Raises:
        EngineError: the output has tokens but no log-probabilities.
    """
    if output.log_probs is None and output.token_ids:
        raise EngineError("verl returned no log-probabilities: set actor_rollout_ref.rollout.calculate_log_probs=true")
    ids = list(output.token_ids)
    stopped = bool(ids) and ids[-1] in sampling.stop_token_ids
    reason = FinishReason.STOP
    if output.stop_reason in ("aborted", "abort"):
        reason = FinishReason.ABORT
    elif not stopped and sampling.max_tokens is not None and len(ids) >= sampling.max_tokens:
        reason = FinishReason.LENGTH
    return GenerateResult(
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.asarray(output.log_probs or [], np.float32),
        finish_reason=reason,
        weight_version=int(output.extra_fields.get("global_steps") or 0),
        stop_reason=ids[-1] if stopped else None,
    )
