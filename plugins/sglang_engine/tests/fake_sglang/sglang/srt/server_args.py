"""The arguments of the fake SGLang."""


class ServerArgs:
    """The engine reads the argument names from the signature."""

    def __init__(
        self,
        model_path,
        trust_remote_code=False,
        dtype="auto",
        device=None,
        context_length=None,
        tp_size=1,
        pp_size=1,
        dp_size=1,
        disable_radix_cache=False,
        skip_tokenizer_init=False,
        skip_server_warmup=False,
        grammar_backend=None,
        enable_return_routed_experts=False,
        log_level="error",
        sampling_mask_max_tokens=4096,
        weight_version="default",
        attention_backend=None,
        disable_cuda_graph=False,
        sampling_backend=None,
        sleep_on_idle=False,
        max_running_requests=None,
        max_total_tokens=None,
        mem_fraction_static=None,
        random_seed=None,
        revision=None,
        enable_memory_saver=False,
        enable_weights_cpu_backup=False,
        enable_deterministic_inference=False,
        schedule_policy="fcfs",
        nnodes=1,
        node_rank=0,
        dist_init_addr=None,
    ):
        pass
