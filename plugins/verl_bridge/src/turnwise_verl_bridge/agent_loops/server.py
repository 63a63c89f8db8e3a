"""The server manager that an agent loop of verl gets: its requests are turns of the episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from turnwise import GenerateResult, SamplingParams
from turnwise.errors import ConfigError
from turnwise_verl_bridge.agent_loops.records import LoopRecords

_RENAMED: Final[Mapping[str, str]] = {"max_new_tokens": "max_tokens"}
_OWN: Final = frozenset({"temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "stop", "seed"})
_WITHOUT_EFFECT: Final[Mapping[str, tuple[object, ...]]] = {
    "logprobs": (True, False, None, 0, 1),
    "n": (1,),
}
"""Options of verl's servers that every request here has anyhow, with the values that say so."""
_MEDIA: Final = ("image_data", "video_data", "audio_data", "mm_processor_output")


class EpisodeServer:
    """
    verl's `LLMServerClient` for one episode.

    Args:
        records: of the episode.
        make_output: makes verl's `TokenOutput` of its fields.
    """

    def __init__(self, records: LoopRecords, make_output: Callable[..., Any]) -> None:
        self._records = records
        self._make_output = make_output

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **options: object
    ) -> Any:
        """
        Continue a context, as verl's client does.

        Args:
            request_id: ignored; the episode names its requests itself.
            prompt_ids: (n,) ids, the whole context.
            sampling_params: under verl's names.
            options: of verl's client; images, videos and audio are refused.

        Raises:
            ConfigError: the engine does not know an option.
            DataError, BudgetExhausted, DeadlineExceeded: as in `LoopRecords.sample`.
        """
        if given := [name for name in _MEDIA if options.get(name) is not None]:
            raise ConfigError(f"{given[0]} is set, but no engine of turnwise takes images, videos or audio")
        sampling, stop = read_sampling(self._records.episode.sampling, sampling_params)
        result = await self._records.sample(prompt_ids, sampling, stop=stop)
        return self._make_output(
            token_ids=result.token_ids.tolist(),
            log_probs=result.logprobs.tolist(),
            stop_reason="completed" if result.finish_reason.is_final else "aborted",
            extra_fields=_weight_steps(result),
        )


class TokenList(list[int]):
    """The ids that verl 0.5's servers return, with the attributes of the `TokenOutput` of later versions."""

    def __init__(self, *, token_ids: list[int], **fields: Any) -> None:
        super().__init__(token_ids)
        self.token_ids = token_ids
        vars(self).update({"num_preempted": None, "routed_experts": None, **fields})


def to_verl_params(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that verl's worker gives a loop."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": 1.0,
        "logprobs": True,
        **sampling.extra,
    }


def read_sampling(run: SamplingParams, params: Mapping[str, Any]) -> tuple[SamplingParams, tuple[str, ...]]:
    """
    Return the sampling parameters of a request, and its stop strings.

    Args:
        run: of the run; a parameter that the loop does not give keeps its value, and stop ids are added to its own.
        params: under verl's names; others are options of the engine, which refuses unknown ones by name.
    """
    changes: dict[str, object] = {}
    extra: dict[str, object] = dict(run.extra)
    stop: tuple[str, ...] = ()
    for given, value in params.items():
        name = _RENAMED.get(given, given)
        if name in _WITHOUT_EFFECT and value in _WITHOUT_EFFECT[name]:
            continue
        if name == "repetition_penalty" and value == 1.0:  # no penalty, which every loop of verl asks for
            extra.pop(name, None)
            continue
        if name not in _OWN:
            extra[given] = value
        elif name == "stop":
            stop = (value,) if isinstance(value, str) else tuple(value or ())
        elif name == "stop_token_ids":
            changes[name] = tuple(dict.fromkeys((*run.stop_token_ids, *map(int, value or ()))))
        elif value is not None:
            changes[name] = value
    if extra != run.extra:
        changes["extra"] = extra
    if changes.get("temperature") == 0:
        changes |= {"top_p": 1.0, "top_k": -1}
    return (run.with_(**changes) if changes else run), stop


def _weight_steps(result: GenerateResult) -> dict[str, int]:
    """Return the weights of a turn, under verl's names."""
    versions = np.atleast_1d(np.asarray(result.weight_version))
    first, last = (int(versions.min()), int(versions.max())) if versions.size else (0, 0)
    return {"global_steps": last, "min_global_steps": first, "max_global_steps": last}
