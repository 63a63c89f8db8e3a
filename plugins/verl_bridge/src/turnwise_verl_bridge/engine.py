"""verl's servers as a turnwise engine: they stay verl's, with their weights, their sleep and their routing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from turnwise.errors import ConfigError, EngineError
from turnwise.types import Capabilities, FinishReason, GenerateRequest, GenerateResult, SamplingParams
from turnwise_verl_bridge.config import VerlEngineConfig

_CLIENT: ContextVar[Any] = ContextVar("turnwise_verl_client")


@contextmanager
def bound_to(client: Any) -> Iterator[None]:
    """Let engines `verl` that are built inside ask this `verl.workers.rollout.llm_server.LLMServerClient`."""
    token = _CLIENT.set(client)
    try:
        yield
    finally:
        _CLIENT.reset(token)


def bound_client() -> Any:
    """Return the client that `bound_to` gave."""
    try:
        return _CLIENT.get()
    except LookupError:
        raise ConfigError("the engine verl asks verl's servers: it works inside verl only") from None


class VerlEngine:
    """
    A facade over verl's server client.

    Weights, sleep and aborts are verl's business; a request that is cancelled here goes on there to its end.
    """

    def __init__(self, config: VerlEngineConfig, client: Any) -> None:
        self._config = config
        self._client = client
        self._num_running = 0
        self._stopped = False

    @property
    def capabilities(self) -> Capabilities:
        """Log-probabilities, and nothing that verl does itself."""
        return Capabilities(max_context=self._config.max_context)

    async def start(self) -> None:
        """Nothing to do: verl has started its servers."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Continue a context. The trajectory's id is verl's sticky session.

        Raises:
            EngineError: an empty context, one that leaves no room, or an answer without log-probabilities.
        """
        limit = self._config.max_context
        if self._stopped:
            raise EngineError("the verl engine was stopped")
        if len(request.token_ids) == 0:
            raise EngineError(f"request {request.request_id!r} has an empty context")
        if limit is not None and len(request.token_ids) >= limit:
            raise EngineError(f"the context has {len(request.token_ids)} tokens; the verl engine has room for {limit}")
        self._num_running += 1
        try:
            output = await self._client.generate(
                request_id=request.trajectory_id.partition("/")[0],
                prompt_ids=request.token_ids.tolist(),
                sampling_params=sampling_of(request.sampling),
            )
        finally:
            self._num_running -= 1
        return result_of(output, request.sampling)

    async def abort(self, request_id: str) -> None:
        """Nothing: verl's client aborts all requests of a server or none."""

    async def sleep(self, level: int) -> None:
        """Raise `EngineError`: verl puts its servers to sleep itself."""
        raise EngineError("verl puts its own servers to sleep")

    async def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        """Raise `EngineError`: verl wakes its servers itself."""
        raise EngineError("verl wakes its own servers")

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Raise `EngineError`: verl brings weights to its servers itself."""
        raise EngineError("verl updates the weights of its own servers")

    def stats(self) -> Mapping[str, float]:
        """Return `num_running`: requests that this process waits for."""
        return {"num_running": self._num_running}

    async def stop(self) -> None:
        """Take no more requests."""
        self._stopped = True


def sampling_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as verl's servers take them; both vLLM's and SGLang's know these names."""
    params: dict[str, Any] = {
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
    return params


def result_of(output: Any, sampling: SamplingParams) -> GenerateResult:
    """
    Return verl's `TokenOutput` as a result.

    verl says `completed` of a turn that ended and of one that was cut: the last token tells them apart.
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
