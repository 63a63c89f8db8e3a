"""
From a model directory to a continuous batching manager that is ready to start.

All that can be wrong with the directory, the packages or the sizes ends here, as one `EngineError` line each.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turnwise.errors import EngineError
from turnwise.protocols import ModelSpec, Resources
from turnwise_transformers_engine.config import TransformersConfig
from turnwise_transformers_engine.sampling import GENERATION_OPTIONS, skip_unused_filters


def model_spec(config: TransformersConfig, resources: Resources) -> ModelSpec:
    """Return which model to load: the engine's own, without the trust that was given to the run's, or the run's."""
    if config.model is not None and config.model != resources.model.path:
        return ModelSpec(path=config.model)
    return resources.model


def model_limit(path: Path | None) -> int | None:
    """Return the most tokens that the model was made for, as far as its directory says, without loading it."""
    try:
        config = json.loads(((path or Path()) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    limit = config.get("text_config", config).get("max_position_embeddings") if isinstance(config, dict) else None
    return limit if isinstance(limit, int) and limit > 0 else None


def takes_layouts(path: Path | None) -> bool:
    """Return whether a model's positions and visibility are free to choose, as far as its directory says."""
    try:
        config = json.loads(((path or Path()) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    config = config.get("text_config", config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not ({"rope_parameters", "rope_theta"} & config.keys()):
        return False
    # These scale all keys by the length of the context, so that keys of a prefix cannot be reused.
    if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        return False
    if layer_types := config.get("layer_types"):
        return set(layer_types) == {"full_attention"}
    return not (config.get("sliding_window") and config.get("use_sliding_window", True))


def load_layout_decoder(config: TransformersConfig, manager: Any, max_context: int) -> Any:
    """Make the decoder of requests with layouts, over the manager's model; its cache takes memory when it is used."""
    capacity = config.layout_cache_tokens or 8 * max_context
    if capacity < max_context:
        raise EngineError(f"layout_cache_tokens is {capacity}: it must hold max_context, {max_context} tokens")
    module = importlib.import_module("turnwise_transformers_engine.layout_decoder")
    return module.LayoutDecoder(manager.model, capacity, config.max_batch_tokens, config.seed)


def load_manager(config: TransformersConfig, spec: ModelSpec, max_context: int) -> Any:
    """
    Load the model and make its manager, warmed up but not started. Blocks for as long as that takes.

    Raises:
        EngineError: a package is missing, the directory holds no causal language model or not all of its weights, or
            the cache cannot hold `max_context` tokens.
    """
    directory = _checked_directory(spec)
    torch, transformers = _packages()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    with _one_line(f"cannot load a causal language model from {str(directory)!r}"):
        model = _load_model(config, spec, torch, transformers)
    with _one_line("cannot make the cache"):
        manager = _make_manager(config, model, max_context)
        manager.warmup()
    _check_capacity(manager, max_context)
    _admit_when_idle(manager.batch_processor.scheduler)
    return manager


def _checked_directory(spec: ModelSpec) -> Path:
    if spec.path is None:
        raise EngineError("the transformers engine has no model: set model.path, or 'model' of the engine")
    if not spec.path.is_dir():
        raise EngineError(f"the model directory {str(spec.path)!r} does not exist")
    if not (spec.path / "config.json").is_file():
        raise EngineError(f"{str(spec.path)!r} is no model directory: it has no config.json")
    return spec.path


def _packages() -> tuple[Any, Any]:
    try:
        torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
        # The names below are loaded lazily, and fail late and at length when, say, torchvision does not fit torch.
        _ = transformers.AutoModelForCausalLM, transformers.ContinuousBatchingConfig
    except (ImportError, RuntimeError, AttributeError) as error:
        raise EngineError(
            f"the transformers engine needs torch and transformers to import: {_first_line(error)}"
        ) from error
    return torch, transformers


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn whatever a library raises about a user's files and sizes into one line."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _load_model(config: TransformersConfig, spec: ModelSpec, torch: Any, transformers: Any) -> Any:
    device = torch.device(_device(config.device, torch))
    dtype = "float32" if config.dtype == "auto" and device.type == "cpu" else config.dtype
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        spec.path,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        attn_implementation=config.attn_implementation,
        trust_remote_code=spec.trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        # transformers would sample from random numbers in their place.
        raise EngineError(f"{str(spec.path)!r} lacks {len(missing)} weights of its model, such as {missing[0]!r}")
    return model.to(device).eval()


def _device(name: str, torch: Any) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _make_manager(config: TransformersConfig, model: Any, max_context: int) -> Any:
    generation = importlib.import_module("transformers.generation")
    num_blocks = config.num_blocks
    if num_blocks is None and model.device.type == "cpu":
        # Free memory is no measure on a CPU: the cache would take most of the machine.
        num_blocks = -(-2 * max_context // config.tokens_per_page)
    batching = generation.ContinuousBatchingConfig(
        page_size=config.tokens_per_page,
        num_blocks=num_blocks,
        max_batch_tokens=config.max_batch_tokens,
        max_memory_percent=config.memory_fraction,
        allow_block_sharing=config.prefix_caching,
        # A step that is under way while weights are swapped would be counted to the wrong version.
        use_async_batching=False,
        auto_switch_to_flash=False,
        use_cuda_graph=False if config.sleep else None,
        per_request_processors=True,
        return_logprobs=True,
        seed=config.seed,
    )
    manager = model.init_continuous_batching(
        generation_config=generation.GenerationConfig(**GENERATION_OPTIONS), continuous_batching_config=batching
    )
    skip_unused_filters(manager, vocab_size=vocab_size(manager))
    if config.attn_implementation == "sdpa" and model.device.type == "cpu":
        # With `sdpa` the manager lets every token look at every other through a mask: the square of the batch.
        model.set_attn_implementation(importlib.import_module(f"{__package__}.varlen_attention").register())
    return manager


def vocab_size(manager: Any) -> int:
    """Return how many ids the model can read and sample."""
    return int(manager.model.config.get_text_config().vocab_size)


def _check_capacity(manager: Any, max_context: int) -> None:
    """Refuse a cache that one request can overflow: the manager does not fail that request, it dies of it."""
    requests = importlib.import_module("transformers.generation.continuous_batching.requests")
    empty = requests.RequestState(request_id="", initial_tokens=[])
    cache = manager.batch_processor.cache
    if not cache.can_store_request_tokens(empty, max_context, dry_run=True):
        raise EngineError(
            f"the cache of {cache.num_blocks} pages cannot hold max_context, {max_context} tokens:"
            " raise num_blocks or memory_fraction, or lower max_context"
        )


def _admit_when_idle(scheduler: Any) -> None:
    """
    Keep requests from waiting forever for one that was cancelled.

    A full cache closes the door to new requests until one that runs has finished. When all that run are cancelled, or
    put back by a weight update, none ever finishes, and the scheduler leaves the door closed.
    """
    clear = scheduler.clear_cancelled_requests

    def cleared() -> Any:
        cancelled = clear()
        if not scheduler.active_requests:
            scheduler.block_new_requests = False
        return cancelled

    scheduler.clear_cancelled_requests = cleared
