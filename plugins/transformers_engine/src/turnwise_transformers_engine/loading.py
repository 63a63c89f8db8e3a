"""
Loads a model directory and makes the backend that decodes it: fused if the model allows it, else transformers' manager.

Problems with the directory, the packages or the sizes are reported here, as one `ConfigError` line each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from turnwise.errors import ConfigError
from turnwise.models.loaded_weights import refuse_missing
from turnwise.protocols import ModelSpec
from turnwise_engine_support.devices import check_device
from turnwise_engine_support.error_lines import engine_errors
from turnwise_engine_support.model_directory import check_model_directory, read_model_config
from turnwise_engine_support.picture_families import supports_pictures
from turnwise_engine_support.progress_bars import hide_progress_bars
from turnwise_moe_routes.shapes import read_shape
from turnwise_transformers_engine.backend import Backend
from turnwise_transformers_engine.config import TransformersConfig
from turnwise_transformers_engine.fused.backend import make_fused_backend
from turnwise_transformers_engine.manager.backend import ManagerBackend
from turnwise_transformers_engine.manager.sampling import GENERATION_OPTIONS, skip_unused_filters
from turnwise_transformers_engine.routes import RouteStore
from turnwise_transformers_engine.vision.backend import VisionBackend, check_vision_options
from turnwise_transformers_engine.weights.served_weights import ServedWeights


def supports_layouts(path: Path | None) -> bool:
    """Return whether a model works with any positions and visibility, judging by its `config.json`."""
    config = read_model_config(path)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not ({"rope_parameters", "rope_theta"} & config.keys()):
        return False
    # These scale all keys by the length of the context, so keys of a prefix cannot be reused.
    if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        return False
    if layer_types := config.get("layer_types"):
        return set(layer_types) == {"full_attention"}
    return not (config.get("sliding_window") and config.get("use_sliding_window", True))


def make_layout_decoder(config: TransformersConfig, backend: Backend, served: ServedWeights, max_context: int) -> Any:
    """Make the decoder of requests with layouts. It shares the backend's model, and its cache grows as it is used."""
    capacity = config.layout_cache_tokens or 8 * max_context
    if capacity < max_context:
        raise ConfigError(f"layout_cache_tokens is {capacity}, but it must be at least max_context, {max_context}")
    from turnwise_transformers_engine.layouts.decoder import LayoutDecoder

    routes = None if backend.routes is None else RouteStore(backend.routes.recorder)
    return LayoutDecoder(
        backend.model,
        capacity,
        config.max_batch_tokens,
        config.seed,
        served=served,
        routes=routes,
        alone=not isinstance(backend, ManagerBackend),
    )


def load_backend(config: TransformersConfig, spec: ModelSpec, served: ServedWeights, max_context: int) -> Backend:
    """
    Load the model and make its backend, which is not started. Blocks until that is done.

    Raises:
        ConfigError: a package is missing, the directory is not a causal language model or lacks weights, or the cache
            cannot hold `max_context` tokens.
    """
    if supports_pictures(spec.path):
        check_vision_options(config)
        if not supports_layouts(spec.path):
            raise ConfigError(
                f"{str(spec.path)!r} is a vision-language model, whose decoder needs full attention and rotary"
                " positions in its text model"
            )
        model = load_model(config, spec)
        return VisionBackend(model, _record_routes(config, spec, model))
    model = load_model(config, spec)
    routes = _record_routes(config, spec, model)
    backend, text = _try_fused(config, model, served, max_context)
    if backend is not None:
        return backend
    if config.decoder == "fused":
        raise ConfigError(f"engine.decoder is 'fused', but {str(spec.path)!r} cannot be fused: {text}")
    if config.product_dtype != "float32":
        raise ConfigError(
            f"engine.product_dtype is {config.product_dtype!r}, which {str(spec.path)!r} cannot have: {text}"
        )
    if config.decoder == "auto":
        structlog.get_logger().info("the generic decoder is used", reason=text)
    manager = make_manager(config, model, max_context)
    return ManagerBackend(manager, served, config.tokens_per_page, config.prefix_caching, routes)


def _record_routes(config: TransformersConfig, spec: ModelSpec, model: Any) -> RouteStore | None:
    """Return the store of the experts of tokens, if they are returned, after hooking the model."""
    if not config.enable_return_routed_experts:
        return None
    from turnwise_moe_routes.recording import RouteRecorder

    shape, problem = read_shape(spec.path), "its config.json has no experts"
    if shape is not None:
        try:
            recorder = RouteRecorder(shape)
            recorder.attach(model)
        except ValueError as error:
            problem = str(error)
        else:
            return RouteStore(recorder)
    raise ConfigError(f"engine.enable_return_routed_experts: {str(spec.path)!r} is no mixture of experts: {problem}")


def _try_fused(
    config: TransformersConfig, model: Any, served: ServedWeights, max_context: int
) -> tuple[Backend | None, str]:
    """Return the fused backend, or the reason why there is none."""
    if config.decoder == "generic":
        return None, "engine.decoder is 'generic'"
    # The fused decoder has run on CPUs only, and has one attention.
    if config.decoder == "auto" and (model.device.type != "cpu" or config.attn_implementation != "sdpa"):
        return None, "the fused decoder is for a CPU and the attention 'sdpa'"
    backend, text = make_fused_backend(model, served, max_context, _num_blocks(config, max_context), config)
    if backend is not None and text:
        structlog.get_logger().info("fused decoder", note=text)
    return backend, text


def load_model(config: TransformersConfig, spec: ModelSpec) -> Any:
    """Load the model onto its device."""
    directory = check_model_directory(spec, "transformers")
    torch, transformers = _import_packages()
    check_device(config.device, "engine.device")
    hide_progress_bars()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    with engine_errors(f"cannot load a causal language model from {str(directory)!r}"):
        return _load_model(config, spec, torch, transformers)


def make_manager(config: TransformersConfig, model: object, max_context: int) -> Any:
    """Make the manager of a model, warmed up but not started."""
    with engine_errors("cannot make the cache"):
        manager = _make_manager(config, model, max_context)
        manager.warmup()
    _check_capacity(manager, max_context)
    _unblock_when_idle(manager.batch_processor.scheduler)
    return manager


def _import_packages() -> tuple[Any, Any]:
    with engine_errors("the transformers engine cannot import torch and transformers", ConfigError):
        import torch
        import transformers

        # These names are loaded lazily, and fail late with a long text if, say, torchvision does not fit torch.
        _ = transformers.AutoModelForCausalLM, transformers.ContinuousBatchingConfig
        _ = transformers.AutoModelForImageTextToText
    return torch, transformers


def _load_model(config: TransformersConfig, spec: ModelSpec, torch: Any, transformers: object) -> Any:
    device = torch.device(_device(config.device, torch))
    dtype = "float32" if config.dtype == "auto" and device.type == "cpu" else config.dtype
    kind = "AutoModelForImageTextToText" if supports_pictures(spec.path) else "AutoModelForCausalLM"
    model, info = getattr(transformers, kind).from_pretrained(
        spec.path,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        attn_implementation=config.attn_implementation,
        trust_remote_code=spec.trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
    )
    refuse_missing(repr(str(spec.path)), info["missing_keys"])
    return model.to(device).eval()


def _device(name: str, torch: Any) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _make_manager(config: TransformersConfig, model: Any, max_context: int) -> Any:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # On a CPU a fraction of the free memory would be most of the machine.
    num_blocks = _num_blocks(config, max_context) if model.device.type == "cpu" else config.num_blocks
    batching = ContinuousBatchingConfig(
        page_size=config.tokens_per_page,
        num_blocks=num_blocks,
        max_batch_tokens=config.max_batch_tokens,
        max_memory_percent=config.memory_fraction,
        allow_block_sharing=config.prefix_caching,
        # The tokens of a step in flight during a weight update would get the wrong version.
        use_async_batching=False,
        auto_switch_to_flash=False,
        # A graph would run no hook.
        use_cuda_graph=False if config.sleep or config.enable_return_routed_experts else None,
        per_request_processors=True,
        return_logprobs=True,
        seed=config.seed,
    )
    generation = GenerationConfig(**GENERATION_OPTIONS)  # type: ignore[no-untyped-call]  # transformers leaves it so
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    skip_unused_filters(manager, vocab_size=int(model.config.get_text_config().vocab_size))
    if config.attn_implementation == "sdpa" and model.device.type == "cpu":
        from turnwise_transformers_engine.manager import varlen_attention

        # With `sdpa` the manager computes the attention of every token to every other one behind a mask: the square of
        # the batch.
        model.set_attn_implementation(varlen_attention.register())
    return manager


def _num_blocks(config: TransformersConfig, max_context: int) -> int:
    """Return the pages of the cache; by default those of two full contexts."""
    return config.num_blocks or -(-2 * max_context // config.tokens_per_page)


def _check_capacity(manager: Any, max_context: int) -> None:
    """Raise `ConfigError` if one request can overflow the cache: the manager would crash instead of failing it."""
    from transformers.generation.continuous_batching.requests import RequestState

    empty = RequestState(request_id="", initial_tokens=[])
    cache = manager.batch_processor.cache
    if not cache.can_store_request_tokens(empty, max_context, dry_run=True):
        raise ConfigError(
            f"the KV cache has {cache.num_blocks} pages, too few for max_context, {max_context} tokens:"
            " raise num_blocks or memory_fraction, or lower max_context"
        )


def _unblock_when_idle(scheduler: Any) -> None:
    """
    Make the scheduler accept new requests if none is active.

    A full cache blocks new requests until an active one finishes. If all active requests are cancelled, or queued again
    by a weight update, none finishes, and the scheduler would block forever.
    """
    clear = scheduler.clear_cancelled_requests

    def clear_and_unblock() -> Any:
        cancelled = clear()
        if not scheduler.active_requests:
            scheduler.block_new_requests = False
        return cancelled

    scheduler.clear_cancelled_requests = clear_and_unblock
