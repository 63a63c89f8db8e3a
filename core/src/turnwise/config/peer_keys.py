"""
Keys of verl (0.9) and TRL (1.x) and the keys of turnwise with the same meaning.

Errors for unknown keys and the page of the reference read this one table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

VERL: Final = "verl"
TRL: Final = "TRL"


class PeerKey(NamedTuple):
    """
    A key of another framework.

    Attributes:
        peer: `verl` or `TRL`.
        key: dotted name there.
        ours: dotted name in a config of turnwise; empty if there is none.
        note: difference in meaning, or the reason why there is none.
    """

    peer: str
    key: str
    ours: str
    note: str = ""

    @property
    def hint(self) -> str:
        """The end of an error text."""
        where = f"use {self.ours}" if self.ours else "it has no equal here"
        return f"a key of {self.peer}; {where}" + (f": {self.note}" if self.note else "")


_ROLLOUT: Final = "actor_rollout_ref.rollout"
_TURNS: Final = f"{_ROLLOUT}.multi_turn"
_ACTOR: Final = "actor_rollout_ref.actor"
_ALGORITHM: Final = "train.algorithm"

_VERL_KEYS: Final = (
    ("data.train_files", "data.path", "several files are data.sources"),
    ("data.val_files", "data.validation_path"),
    ("data.prompt_key", "data.columns.prompt"),
    ("data.reward_fn_key", "data.columns.data_source"),
    ("data.train_batch_size", "train.tasks_per_step"),
    ("data.train_max_samples", "data.limit"),
    ("data.val_max_samples", "train.validation.limit"),
    ("data.max_prompt_length", "rollout.prompt_length"),
    ("data.max_response_length", "rollout.response_length"),
    ("data.truncation", "data.prompt_policy", "left is truncate_left, right is truncate_right"),
    ("data.filter_overlong_prompts", "data.prompt_policy", "true is drop"),
    ("data.seed", "rollout.seed"),
    ("data.trust_remote_code", "model.trust_remote_code"),
    ("data.apply_chat_template_kwargs", "model.template_options"),
    ("data.tool_config_path", "tools", "[{name: verl, file: FILE, modules: [verl, YOUR_MODULE]}]"),
    ("data.image_key", "", "no engine takes images"),
    ("data.video_key", "", "no engine takes videos"),
    ("actor_rollout_ref.model.path", "model.path"),
    ("actor_rollout_ref.model.trust_remote_code", "model.trust_remote_code"),
    ("actor_rollout_ref.model.custom_chat_template", "model.chat_template", "a file"),
    ("actor_rollout_ref.model.enable_gradient_checkpointing", "train.policy.gradient_checkpointing"),
    ("actor_rollout_ref.model.use_remove_padding", "train.policy.packed"),
    ("actor_rollout_ref.model.lora_rank", "train.lora.rank"),
    ("actor_rollout_ref.model.lora_alpha", "train.lora.alpha"),
    ("actor_rollout_ref.model.target_modules", "train.lora.target_modules"),
    (f"{_ROLLOUT}.name", "engine.name"),
    (f"{_ROLLOUT}.n", "rollout.n"),
    (f"{_ROLLOUT}.seed", "rollout.seed"),
    (f"{_ROLLOUT}.temperature", "rollout.sampling.temperature"),
    (f"{_ROLLOUT}.top_p", "rollout.sampling.top_p"),
    (f"{_ROLLOUT}.top_k", "rollout.sampling.top_k"),
    (f"{_ROLLOUT}.do_sample", "rollout.sampling.temperature", "false is 0"),
    (f"{_ROLLOUT}.prompt_length", "rollout.prompt_length"),
    (f"{_ROLLOUT}.response_length", "rollout.response_length"),
    (f"{_ROLLOUT}.calculate_log_probs", "", "every engine returns log-probabilities"),
    (f"{_ROLLOUT}.dtype", "engine.dtype"),
    (f"{_ROLLOUT}.gpu_memory_utilization", "engine.gpu_memory_utilization"),
    (f"{_ROLLOUT}.enforce_eager", "engine.enforce_eager"),
    (f"{_ROLLOUT}.free_cache_engine", "memory.mode", "true is hybrid"),
    (f"{_ROLLOUT}.tensor_model_parallel_size", "engine.tensor_parallel_size"),
    (f"{_ROLLOUT}.data_parallel_size", "engine.data_parallel_size"),
    (f"{_ROLLOUT}.pipeline_model_parallel_size", "engine.pipeline_parallel_size"),
    (f"{_ROLLOUT}.max_model_len", "engine.max_context"),
    (f"{_ROLLOUT}.max_num_seqs", "engine.max_num_seqs"),
    (f"{_ROLLOUT}.enable_prefix_caching", "engine.prefix_caching"),
    (f"{_ROLLOUT}.engine_kwargs", "engine.engine_args", "the section of the chosen engine"),
    (f"{_ROLLOUT}.val_kwargs.n", "rollout.validation_n"),
    (f"{_ROLLOUT}.val_kwargs.temperature", "rollout.validation_sampling.temperature"),
    (f"{_ROLLOUT}.val_kwargs.top_p", "rollout.validation_sampling.top_p"),
    (f"{_ROLLOUT}.val_kwargs.top_k", "rollout.validation_sampling.top_k"),
    (f"{_ROLLOUT}.val_kwargs.do_sample", "rollout.validation_sampling.temperature", "false is 0"),
    (f"{_ROLLOUT}.agent.num_workers", "runtime.num_workers"),
    (f"{_ROLLOUT}.agent.default_agent_loop", "agent.name"),
    (f"{_ROLLOUT}.agent.agent_loop_config_path", "agent.file", "with agent.name: verl"),
    (f"{_ROLLOUT}.agent.agent_loop_manager_class", "", "turnwise is the manager"),
    (f"{_TURNS}.enable", "agent.name", "tool_agent has several turns, single_turn one"),
    (f"{_TURNS}.max_assistant_turns", "agent.max_assistant_turns"),
    (f"{_TURNS}.max_user_turns", "agent.max_user_turns"),
    (f"{_TURNS}.max_parallel_calls", "agent.max_parallel_calls"),
    (f"{_TURNS}.max_tool_response_length", "agent.max_tool_response_length"),
    (f"{_TURNS}.tool_response_truncate_side", "agent.tool_response_truncate_side"),
    (f"{_TURNS}.format", "parser"),
    (f"{_TURNS}.tool_config_path", "tools", "[{name: verl, file: FILE, modules: [verl, YOUR_MODULE]}]"),
    (f"{_TURNS}.function_tool_path", "tools", "the functions as ./FILE.py:NAME"),
    (f"{_TURNS}.interaction_config_path", "interaction", "{name: verl, file: FILE, modules: [verl, YOUR_MODULE]}"),
    (f"{_ACTOR}.optim.lr", "train.optimizer.lr"),
    (f"{_ACTOR}.optim.weight_decay", "train.optimizer.weight_decay"),
    (f"{_ACTOR}.optim.lr_warmup_steps", "train.optimizer.warmup_steps"),
    (f"{_ACTOR}.grad_clip", "train.optimizer.grad_clip"),
    (f"{_ACTOR}.clip_ratio", f"{_ALGORITHM}.clip_ratio_low", "and clip_ratio_high"),
    (f"{_ACTOR}.clip_ratio_low", f"{_ALGORITHM}.clip_ratio_low"),
    (f"{_ACTOR}.clip_ratio_high", f"{_ALGORITHM}.clip_ratio_high"),
    (f"{_ACTOR}.loss_agg_mode", f"{_ALGORITHM}.loss_agg_mode"),
    (f"{_ACTOR}.entropy_coeff", f"{_ALGORITHM}.entropy_coeff"),
    (f"{_ACTOR}.kl_loss_coef", f"{_ALGORITHM}.kl_loss_coef"),
    (f"{_ACTOR}.use_kl_loss", f"{_ALGORITHM}.kl_loss_coef", "false is 0"),
    (f"{_ACTOR}.kl_loss_type", f"{_ALGORITHM}.kl_loss_type", "kl is k1, mse is not known, low_var_kl is k3"),
    (f"{_ACTOR}.ppo_epochs", f"{_ALGORITHM}.ppo_epochs"),
    (f"{_ACTOR}.ppo_mini_batch_size", f"{_ALGORITHM}.ppo_mini_batch_size", "episodes instead of prompts"),
    (f"{_ACTOR}.ppo_max_token_len_per_gpu", "train.policy.max_tokens_per_micro_batch"),
    ("algorithm.adv_estimator", f"{_ALGORITHM}.adv_estimator"),
    ("algorithm.gamma", f"{_ALGORITHM}.gamma"),
    ("algorithm.lam", f"{_ALGORITHM}.lam"),
    ("algorithm.use_kl_in_reward", f"{_ALGORITHM}.use_kl_in_reward"),
    ("algorithm.norm_adv_by_std_in_grpo", f"{_ALGORITHM}.adv_estimator", "false is dr_grpo"),
    ("algorithm.filter_groups.enable", "train.buffer.dynamic_sampling"),
    ("critic.optim.lr", "train.critic.lr"),
    ("critic.cliprange_value", "train.critic.cliprange_value"),
    ("trainer.critic_warmup", "train.critic.warmup_steps"),
    ("trainer.total_training_steps", "train.num_steps"),
    ("trainer.total_epochs", "train.num_steps", "steps instead of epochs"),
    ("trainer.save_freq", "train.checkpoint.every"),
    ("trainer.test_freq", "train.validation.every"),
    ("trainer.max_actor_ckpt_to_keep", "train.checkpoint.keep_last"),
    ("trainer.default_local_dir", "", "the option --out of the command"),
    ("trainer.resume_mode", "", "the option --resume of the command"),
    ("trainer.logger", "observers"),
    ("trainer.n_gpus_per_node", "train.sharding.num_processes", "all GPUs that train"),
    ("trainer.nnodes", "runtime.ray.address", "a cluster that runs"),
    ("trainer.device", "train.policy.device"),
    ("reward.custom_reward_function.path", "reward", "./FILE.py:NAME, with the file in modules"),
    ("reward.custom_reward_function.name", "reward", "./FILE.py:NAME, with the file in modules"),
    ("custom_reward_function.path", "reward", "./FILE.py:NAME, with the file in modules"),
    ("custom_reward_function.name", "reward", "./FILE.py:NAME, with the file in modules"),
    ("reward.num_workers", "runtime.reward_workers"),
)

_TRL_KEYS: Final = (
    ("num_generations", "rollout.n"),
    ("num_generations_eval", "rollout.validation_n"),
    ("max_prompt_length", "rollout.prompt_length"),
    ("max_completion_length", "rollout.response_length", "tool results included"),
    ("temperature", "rollout.sampling.temperature"),
    ("top_p", "rollout.sampling.top_p"),
    ("top_k", "rollout.sampling.top_k", "0 is -1"),
    ("min_p", "rollout.sampling.extra", "{min_p: VALUE}"),
    ("repetition_penalty", "rollout.sampling.extra", "{repetition_penalty: VALUE}"),
    ("generation_kwargs", "rollout.sampling.extra"),
    ("chat_template_kwargs", "model.template_options"),
    ("max_tool_calling_iterations", "agent.max_assistant_turns", "turns, one more than the iterations"),
    ("reward_funcs", "reward", "./FILE.py:NAME, with the file in modules"),
    ("per_device_train_batch_size", "train.tasks_per_step", "groups of a step on all devices"),
    ("generation_batch_size", "train.tasks_per_step", "groups instead of completions"),
    ("learning_rate", "train.optimizer.lr"),
    ("weight_decay", "train.optimizer.weight_decay"),
    ("adam_epsilon", "train.optimizer.eps"),
    ("max_grad_norm", "train.optimizer.grad_clip"),
    ("lr_scheduler_type", "train.optimizer.lr_schedule"),
    ("warmup_steps", "train.optimizer.warmup_steps"),
    ("max_steps", "train.num_steps"),
    ("num_train_epochs", "train.num_steps", "steps instead of epochs"),
    ("save_steps", "train.checkpoint.every"),
    ("save_total_limit", "train.checkpoint.keep_last"),
    ("eval_steps", "train.validation.every"),
    ("output_dir", "", "the option --out of the command"),
    ("gradient_checkpointing", "train.policy.gradient_checkpointing"),
    ("bf16", "train.policy.autocast"),
    ("beta", f"{_ALGORITHM}.kl_loss_coef"),
    ("num_iterations", f"{_ALGORITHM}.ppo_epochs"),
    ("epsilon", f"{_ALGORITHM}.clip_ratio_low", "and clip_ratio_high"),
    ("epsilon_high", f"{_ALGORITHM}.clip_ratio_high"),
    ("scale_rewards", f"{_ALGORITHM}.adv_estimator", "none is dr_grpo"),
    ("loss_type", f"{_ALGORITHM}.loss_agg_mode", "dapo is token-mean, grpo is seq-mean-token-mean"),
    ("importance_sampling_level", "train.loss", "sequence is gspo"),
    ("mask_truncated_completions", f"{_ALGORITHM}.mask_truncated"),
    ("entropy_coef", f"{_ALGORITHM}.entropy_coeff"),
    ("vllm_importance_sampling_cap", f"{_ALGORITHM}.tis_imp_ratio_cap"),
    ("vllm_importance_sampling_clip_max", f"{_ALGORITHM}.tis_imp_ratio_cap"),
    ("use_vllm", "engine.name", "vllm"),
    ("vllm_mode", "memory.mode", "colocate is hybrid, server is standalone"),
    ("vllm_enable_sleep_mode", "memory.mode", "true is hybrid"),
    ("vllm_gpu_memory_utilization", "engine.gpu_memory_utilization"),
    ("vllm_max_model_length", "engine.max_context"),
    ("vllm_tensor_parallel_size", "engine.tensor_parallel_size"),
    ("shuffle_dataset", "data.shuffle"),
    ("report_to", "observers"),
    ("log_completions", "train.episodes.every", "a file for each step, which turnwise view shows"),
)

PEER_KEYS: Final = (
    *(PeerKey(VERL, *entry) for entry in _VERL_KEYS),
    *(PeerKey(TRL, *entry) for entry in _TRL_KEYS),
)
"""The table, in the order of the frameworks' own configs."""
_BY_KEY: Final[Mapping[str, PeerKey]] = {entry.key: entry for entry in reversed(PEER_KEYS)}
_TRL_SECTIONS: Final = ("", "train", "rollout", "rollout.sampling", "data", "model", "engine")
_UNKNOWN: Final = re.compile(r"(?P<path>\S+?)(?:: unknown key|\.name: missing; the section has only )")


def find_peer_key(path: str) -> PeerKey | None:
    """
    Return the entry for an unknown key of a config, which has the whole name of the key or its last part.

    A last part counts where people write it: a name of TRL in the sections for its options, and one of verl in a
    section of the same name as in verl. All entries with that part must have the same meaning.
    """
    if path in _BY_KEY:
        return _BY_KEY[path]
    section, _, last = path.rpartition(".")
    found = [each for each in PEER_KEYS if each.key.rpartition(".")[2] == last and _fits(each, section)]
    same = len({each.ours for each in found}) == 1 and found[0].ours not in ("", path)
    return found[0] if same else None


def _fits(entry: PeerKey, section: str) -> bool:
    if entry.peer == TRL:
        return section in _TRL_SECTIONS
    return section.rpartition(".")[2] in entry.key.split(".")[:-1]


def explain_sections(lines: list[str], data: object) -> Iterator[str]:
    """
    Yield error lines, where a line about an unknown section becomes one for each of its keys if a peer has such keys.

    Args:
        lines: of a `ConfigError`.
        data: the plain values of the config.
    """
    for line in lines:
        match = _UNKNOWN.match(line)
        leaves = list(_leaves(_value_at(data, match["path"]), match["path"])) if match else []
        if match and leaves != [match["path"]] and any(map(find_peer_key, leaves)):
            for leaf in leaves:
                entry = find_peer_key(leaf)
                yield f"{leaf}: unknown key; {entry.hint if entry else 'it has no equal here'}"
        else:
            yield line


def _value_at(data: object, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(data, Mapping) or key not in data:
            return None
        data = data[key]
    return data


def _leaves(value: object, path: str) -> Iterator[str]:
    # A section that an entry names as a whole, such as verl's engine_kwargs, is not taken apart.
    if isinstance(value, Mapping) and value and path not in _BY_KEY:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    else:
        yield path
