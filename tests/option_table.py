"""
Tables of the matrix of options: values of keys of free form, what a key or a part needs, and what a plan must refuse.

A key that has no values here and whose type has none makes `test_every_key_has_values` fail, and so does a name here
that no key has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
NOTES: Final = {"command": sys.executable, "args": [str(ROOT / "tests/plain_mcp_server.py")]}
_DEMO: Final = "package:turnwise_calculator_demo"
_TAGS: Final = ("<Parallel>", "</Parallel>", "<Path>", "</Path>", "<Summary>", "</Summary>")
_OTHER_TAGS: Final = ("<Split>", "</Split>", "<Way>", "</Way>", "<End>", "</End>")
_COMMAND: Final = {"agent": {"command": [sys.executable, "-c", "print(1)"], "function": ""}}
GPT_OSS_TOKENS: Final = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
ALL_TAGS: Final = (*_TAGS, *_OTHER_TAGS)
"""Tokens of the run's tokenizer for paths."""
COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"


_PARSERS: Final = (
    *("deepseek_v3", "glm45", "granite", "hermes", "kimi_k2", "llama3_json", "llama4_pythonic", "mistral", "phi4"),
    "qwen3_coder",
)


def _tag_values(part: str) -> dict[str, tuple[Any, ...]]:
    names = ("block", "end_block", "path", "end_path", "summary", "end_summary")
    values: dict[str, tuple[Any, ...]] = {
        f"{part}.tags.{name}": (tag,) for name, tag in zip(names, _OTHER_TAGS, strict=True)
    }
    return values | {f"{part}.tags.separator": ("", "\n\n")}


def _reasoning_tags(*parsers: str) -> dict[str, tuple[Any, ...]]:
    return {
        f"tool_parsers/{name}.reasoning_{end}_tag": (tag, "")
        for name in parsers
        for end, tag in (("open", "<think>"), ("close", "</think>"))
    }


VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "chats/harmony.model_identity": ("You are a model.",),
    "chats/harmony.knowledge_cutoff": ("2025-01",),
    "chats/harmony.date": ("2026-05-31", None),
    "data.path": ("data.jsonl", "package:matrix_data/data.jsonl"),
    "data.sources": ([],),
    "data.sources.path": ("data.jsonl", "data.csv"),
    "data.sources.name": ("first", None),
    "data.sources.columns": ({"prompt": "question"}, None),
    "data.validation_path": ("data.jsonl", None),
    "data.columns": ({"ground_truth": "truth"}, {"agent_name": None}, {}),
    "model.path": ("model", _DEMO),
    "model.revision": (COMMIT, None),
    "model.commit": (COMMIT, None),
    "model.chat_template": ("template.jinja", None),
    "model.template_options": ({"enable_thinking": False}, {}),
    "judge.model.path": ("model", None),
    "judge.model.revision": (COMMIT, None),
    "judge.model.commit": (COMMIT, None),
    "judge.model.chat_template": ("template.jinja", None),
    "judge.model.template_options": ({"enable_thinking": False}, {}),
    "judge.sampling.stop_token_ids": ([10], []),
    "judge.sampling.stop": ([],),
    "judge.sampling.extra": ({"min_p": 0.1}, {}),
    "judge.pool.replica_resources": ({"num_cpus": 0.5}, {"memory": 1 << 20}, {}),
    "judge.pool.replica_python": (sys.executable, None),
    # Not the most processes that a config may ask for: this machine starts each of them.
    "judge.pool.num_replicas": (4, 1, None),
    "judge.pool.total_devices": (4, 1, None),
    "runtime.num_workers": (2, 1),
    "runtime.reward_workers": (1, 0),
    "tools_file": ("tools.yaml", None),
    "modules": (["matrix_code"], ["./own.py"], []),
    "rollout.sampling.stop_token_ids": ([10], []),
    "rollout.sampling.stop": ([],),
    "rollout.sampling.extra": ({"min_p": 0.1}, {}),
    "rollout.validation_sampling.stop_token_ids": ([10], []),
    "rollout.validation_sampling.stop": ([],),
    "rollout.validation_sampling.extra": ({"min_p": 0.1}, {}),
    "runtime.ray.address": (None, "auto", "127.0.0.1:6379", "ray://127.0.0.1:10001", "[::1]:6379"),
    "runtime.ray.replica_resources": ({"num_cpus": 0.5}, {"resources": {}}, {"labels": {}}, {}),
    "runtime.ray.worker_resources": ({"num_cpus": 0.5}, {"memory": 1 << 20}, {}),
    "runtime.ray.replica_python": (sys.executable, None),
    "weights.rename": ({"^module\\.": ""}, {}),
    "weights.fuse": ({"qkv": ["q", "k", "v"]}, {}),
    "train": ({}, {"num_steps": 1}),
    "plugins": (None,),
    "agents/environment.environment": ("guess_number", "matrix_code:Vault"),
    "agents/environment.options": ({"low": 2}, {}),
    "agents/environment.system_prompt": ("Be brief.", ""),
    "agents/external.model": ("other",),
    "agents/external.models": ({"cheap-*": "untrained", "o1": "refuse"}, {}),
    "agents/external.picture_hosts": (["images.example.com", "127.0.0.1:8080"], []),
    "agents/external.command": ([sys.executable, "-c", "print(1)"],),
    "agents/external.function": ("matrix_code:solve",),
    "agents/task_pool.control_file": ("control.json",),
    "agents/task_pool.pool_file": ("pool.sqlite", None),
    "agents/task_pool.secret_variable": ("MATRIX_SECRET",),
    "agents/external.environment": ({"WORD": "x"}, {}),
    "agents/external.inherit": (["LANG"], "all", []),
    "agents/external.keep_requests": ("requests", None),
    "agents/external.workspace.image": ("",),
    "agents/external.workspace.folder": ("/work",),
    "agents/external.workspace.files": ({"notes.txt": "Add."}, {}),
    "agents/external.workspace.files_column": ("texts",),
    "agents/external.workspace.mounts": ({"/opt/agent": "/usr/share"}, {}),
    "agents/external.workspace.environment": ({"WORD": "x"}, {}),
    "agents/external.workspace.state": ("state",),
    "agents/task_pool.model": ("other",),
    "agents/task_pool.models": ({"cheap-*": "untrained"},),
    "agents/task_pool.picture_hosts": (["images.example.com"], []),
    "agents/task_pool.control_host": ("10.0.0.1", None),
    "agents/task_pool.keep_requests": ("requests", None),
    "agents/parallel_thinking.path_seeds": ([3, 4], []),
    "agents/parallel_thinking.prompt_suffix": (" Think twice.", ""),
    **_tag_values("agents/parallel_thinking"),
    "agents/single_turn.system_prompt": ("Be brief.", ""),
    "agents/tool_agent.system_prompt": ("Be brief.", ""),
    "agents/torl_python.empty_output": ("nothing",),
    "agents/torl_python.no_code_output": ("no code",),
    "agents/torl_python.plain_prompt": ("Question: [PROMPT]\nAnswer:",),
    "agents/torl_python.system_prompt": ("Be brief.", ""),
    "agents/torl_python.tool": ("python",),
    "agents/verl.loop": ("matrix_code.Loop",),
    "agents/verl.file": ("own.py", "loops.yaml", None),
    "agents/verl.modules": (["verl", "matrix_code"],),
    "agents/verl.config": ({"actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 5}, {}),
    "agents/verl.options": ({"depth": 2}, {}),
    "engines/openai.urls": (["http://127.0.0.1:8000", "http://127.0.0.1:8001"],),
    "engines/openai.model": ("policy", None),
    "engines/openai.api_key_env": ("MATRIX_KEY", None),
    "engines/openai.ca_file": ("ca.pem", None),
    "engines/sglang.model": ("model", None),
    "engines/sglang.engine_args": ({"schedule_policy": "fcfs"}, {}),
    "engines/transformers.model": (str(ROOT / "plugins/calculator_demo/src/turnwise_calculator_demo/model"), None),
    "engines/transformers.device": ("cpu",),
    "engines/vllm.model": ("model", None),
    "engines/vllm.weight_dir": ("weights", None),
    "engines/vllm.engine_args": ({"max_num_batched_tokens": 64}, {}),
    **_reasoning_tags(*_PARSERS),
    "tool_parsers/hermes.open_tag": ("<call>",),
    "tool_parsers/hermes.close_tag": ("</call>",),
    "reasoning_parsers/think_tags.start": ("<thought>",),
    "reasoning_parsers/think_tags.end": ("</thought>",),
    "rewards/parallel_r1.answer_prefix": ("Answer:",),
    **_tag_values("rewards/parallel_r1"),
    "interactions/model_user.goal": ("You want a sum.", ""),
    "interactions/model_user.column": ("wish",),
    "interactions/model_user.instructions": ("Play a user. {goal} End with {stop}.",),
    "interactions/model_user.stop": ("STOP",),
    "interactions/scripted_user.replies": (["And twice that?"], []),
    "interactions/scripted_user.column": ("lines",),
    "interactions/scripted_user.stop_when": (["3"], []),
    "interactions/verl.file": ("verl_users.yaml",),
    "interactions/verl.modules": (["verl", "matrix_code"],),
    "tools/mcp.servers": ({"notes": NOTES},),
    "tools/mcp.file": ("mcp.json", None),
    "tools/mcp.include": (["notes.add_*"], ["*"]),
    "tools/mcp.exclude": (["notes.describe"], []),
    "tools/python.sandbox.preload": (["math"], []),
    "tools/python.sandbox.cgroup": ("",),
    "tools/python.sandbox.python": ("", sys.executable),
    "tools/python.sandbox.readable": (["/usr"], []),
    "tools/python.sandbox.remote_url": ("",),
    "tools/python.sandbox.remote_token_env": ("",),
    "tools/python.empty_output": ("nothing",),
    "tools/python.description": ("Run a program.",),
    "rewards/workspace_tests.path": ("/usr/bin:/bin", ""),
    "rewards/workspace_tests.environment": ({"WORD": "x"}, {}),
    "tools/workspace.image": ("",),
    "tools/workspace.folder": ("/work",),
    "tools/workspace.files": ({"notes.txt": "Add."}, {}),
    "tools/workspace.files_column": ("texts",),
    "tools/workspace.mounts": ({"/opt/agent": "/usr/share"}, {}),
    "tools/workspace.environment": ({"WORD": "x"}, {}),
    "tools/workspace.tools": (["shell"],),
    "tools/workspace.shell": ("/bin/sh",),
    "tools/workspace.python": ("python3",),
    "tools/workspace.state": ("state",),
    "tools/verl.file": ("verl_tools.yaml",),
    "tools/verl.modules": (["verl", "matrix_code"],),
    "middleware/redact_secrets.patterns": (["key-[0-9]+"], []),
    "middleware/redact_secrets.environment": (["MATRIX_KEY"], []),
    "middleware/redact_secrets.tools": (["calculator"], []),
    "middleware/redact_secrets.replacement": ("***", ""),
    "middleware/tool_rate.tools": (["calculator"], []),
    "observers/mlflow.tracking_uri": ("./mlruns",),
    "observers/mlflow.experiment": ("matrix",),
    "observers/mlflow.run_name": ("first", None),
    "observers/mlflow.tags": ({"kind": "matrix"}, {}),
    "observers/otel.endpoint": ("http://127.0.0.1:1", None),
    "observers/otel.service_name": ("matrix",),
    "observers/prometheus.host": ("127.0.0.1", "::1"),
    "observers/prometheus.token_env": ("MATRIX_KEY",),
    "observers/trace_file.path": ("trace.json",),
    "observers/wandb.project": ("matrix",),
    "observers/wandb.entity": ("team", None),
    "observers/wandb.group": ("group", None),
    "observers/wandb.run_name": ("first", None),
    "observers/wandb.tags": (["grpo"], []),
    "weight_transports/disk.directory": (".", None),
    "weight_transports/gloo.host": ("127.0.0.1",),
    "weight_transports/nccl.host": ("127.0.0.1",),
    "train.algorithm.mis_bounds": ([0.5, 2.0], None),
    "train.optimizer.betas": ([0.9, 0.95],),
    "train.policy.device": ("auto", "cpu"),
    "train.policy.attn_implementation": ("sdpa", "eager"),
    "train.lora.target_modules": (["all-linear"], ["q_proj", "v_proj"]),
    "train.validation.score": ("reward/mean", "reward/max"),
}
"""Values of keys of free form."""

INSTEAD: Final[dict[str, tuple[Any, ...]]] = {
    # Below these, no prompt and no answer of any run has room, or all time is over at once.
    "rollout.prompt_length": (4096, 4000),
    "rollout.response_length": (512, 200),
    "rollout.max_steps": (200, 1000),
    "rollout.max_sampled_tokens": (400, None),
    "engines/openai.max_context": (2, 8192, None),
    "engines/transformers.max_context": (512, 2048),
    "engines/transformers.num_blocks": (400, None),
    "engines/transformers.page_size": (16, 32, None),
    "engines/transformers.layout_cache_tokens": (16384, None),
    "runtime.num_replicas": (2, 1, None),
    "runtime.total_devices": (2, 1, None),
    "runtime.ray.max_replicas": (2, None),
    "judge.pool.num_replicas": (2, 1, None),
    "judge.pool.total_devices": (2, 1, None),
    "rollout.sampling.top_k": (-1, 1, 5),
    "rollout.validation_sampling.top_k": (-1, 1, 5),
    "judge.sampling.top_k": (-1, 1, 5),
    "observers/prometheus.port": (0,),
    "agents/task_pool.control_port": (0,),
    # The time of an agent: a busy machine must have enough of it.
    "agents/external.session_s": (90.5, None),
    "agents/external.start_s": (90.5, None),
    "agents/external.idle_s": (90.5, None),
    "agents/task_pool.session_s": (90.5, None),
    "agents/task_pool.start_s": (90.5, None),
    "agents/task_pool.idle_s": (90.5, None),
    "weight_transports/gloo.port": (0, 29511),
    "weight_transports/nccl.port": (0, 29512),
    "tools/python.sandbox.memory_mb": (256, 512),
    "train.tasks_per_step": (1, 2),
    "train.optimizer.lr": (1e-5, 0.0),
    "train.optimizer.eps": (1e-6,),
    "train.buffer.max_groups": (2, None),
    "train.algorithm.overlong.cache_length": (4, 1),
    "train.algorithm.overlong.max_length": (64, None),
    "train.sharding.gpus_per_process": (0.0, None),
}
"""Values in place of the ones that the types and bounds give, because of rules between keys."""

_PATIENCE: Final = {"data": {"validation_path": "data.jsonl"}, "train": {"validation": {"every": 1}}}
_NO_TAGS: Final = {"parser": {"reasoning_open_tag": "", "reasoning_close_tag": ""}}
NEEDS: Final[dict[str, dict[str, Any]]] = {
    **{f"tool_parsers/{name}.reasoning_{end}_tag=": _NO_TAGS for name in _PARSERS for end in ("open", "close")},
    "data.sources": {"data": {"path": None, "limit": None, "sources": {0: {"path": "data.jsonl"}}}},
    "data.sources=[]": {"data": {"path": "data.jsonl"}},
    "model.template_options={'enable_thinking': False}": {
        "model": {"path": "model", "chat_template": "template.jinja"}
    },
    "judge.model.template_options={'enable_thinking': False}": {
        "judge": {"model": {"path": "model", "chat_template": "template.jinja"}}
    },
    "judge.model": {"judge": {"model": {"path": "model"}}},
    "agents/parallel_thinking": {"model": {"path": "model"}},
    "agents/parallel_thinking.path_seeds=[3, 4]": {"agent": {"num_paths": 2}},
    "data.format=csv": {"data": {"path": "data.csv"}},
    "data.format=json": {"data": {"path": "data.json"}},
    "data.format=parquet": {"data": {"path": "data.parquet"}},
    "model.trust_remote_code=True": {"model": {"revision": COMMIT}},
    "judge.model.trust_remote_code=True": {"judge": {"model": {"revision": COMMIT}}},
    "judge": {"judge": {"engine": {"name": "matrix"}}},
    "rollout.sampling.extra={'min_p': 0.1}": {"engine": {"name": "matrix"}},
    "rollout.validation_sampling.extra={'min_p': 0.1}": {"engine": {"name": "matrix"}},
    "rollout.validation=True": {"data": {"validation_path": "data.jsonl"}},
    "rewards/reasoning_gym": {"data": {"path": "reasoning_gym:chain_sum?size=2"}},  # it scores its own tasks alone
    "rewards/bfcl": {"data": {"path": "bfcl.jsonl"}},  # as the one above
    "tools/bfcl": {"data": {"path": "bfcl.jsonl"}},  # rows without tools; a prompt with all of them has 13,000 tokens
    "rewards/drawn_scenes": {"data": {"path": "scenes.jsonl"}},
    "rewards/workspace_tests": {"tools": {"workspace": {}}, "data": {"path": "graded.jsonl"}},
    "modules=['matrix_code']": {"reward": {"name": "matrix_code:score"}},
    "modules=['./own.py']": {"reward": {"name": "./own.py:score"}},
    "agents/environment": {"agent": {"environment": "guess_number"}},
    "agents/environment.options={'low': 2}": {"agent": {"environment": "matrix_code:Vault"}},
    "agents/external": {"agent": {"function": "matrix_code:solve"}},
    "agents/external.command": _COMMAND,
    "agents/external.environment": _COMMAND,
    "agents/external.inherit": _COMMAND,
    "agents/external.bind_keys": _COMMAND,
    "agents/external.workspace": _COMMAND,
    "agents/task_pool": {"agent": {"control_file": "control.json"}},
    "agents/external.structured_output=constrain": {"reasoning_parser": "think_tags", "engine": {"name": "matrix"}},
    "agents/task_pool.structured_output=constrain": {"reasoning_parser": "think_tags", "engine": {"name": "matrix"}},
    "agents/torl_python": {"tools": {"python": {}}},
    "agents/torl_python.system_prompt": {"agent": {"template": "chat"}},
    "interactions/model_user": {
        "interaction": {"goal": "You want a sum."},
        "judge": {"engine": {"name": "matrix"}, "model": {"path": "model"}},
    },
    "interactions/verl": {"interaction": {"file": "verl_users.yaml", "modules": ["matrix_code"]}},
    "chats/harmony": {"model": {"path": "gpt_oss"}},
    "chats/jinja.tools=system_prompt": {"parser": {"name": "hermes"}},
    "engines/openai": {"engine": {"urls": ["http://127.0.0.1:8000"]}},
    "engines/transformers": {"model": {"path": _DEMO}},
    "tools/mcp": {"tools": {"mcp": {"servers": {"notes": NOTES}}}},
    "tools/verl": {"tools": {"verl": {"file": "verl_tools.yaml", "modules": ["matrix_code"]}}},
    "observers/otel": {"observers": {"otel": {"endpoint": "http://127.0.0.1:1"}}},
    "observers/trace_file": {"observers": {"trace_file": {"path": "trace.json"}}},
    "observers/wandb": {"observers": {"wandb": {"mode": "offline"}}},
    "observers/mlflow": {"observers": {"mlflow": {"tracking_uri": "./mlruns"}}},
    "train.checkpoint.export=best": {
        "data": {"validation_path": "data.jsonl"},
        "train": {"checkpoint": {"keep_best": True}},
    },
    "train.validation.patience=4": _PATIENCE,
    "train.validation.patience=1": _PATIENCE,
    "train.lora": {"train": {"lora": {"rank": 4}}},
    "train.algorithm.overlong": {"train": {"algorithm": {"overlong": {"cache_length": 4}}}},
}
"""
Changes that a kind of part, a part, a section, a key or a value (`key=value`) needs. A longer name replaces what a
shorter one sets.
"""

NEEDS_ON_RAY: Final[dict[str, dict[str, Any]]] = {"group_rewards": {"runtime": {"reward_workers": 1}}}
"""The same on Ray only."""

_ON_HUB: Final = ("both", "HF_HUB_OFFLINE is set", "commit of the hub that `path` and `revision` meant")
_ONE: Final = "must be 1 with the runtime local"
REFUSED: Final[dict[str, tuple[str, str, str]]] = {
    "runtime.num_replicas=2": ("local", _ONE, "more than one needs the runtime `ray`"),
    "runtime.total_devices=2": (
        "local",
        "and the runtime local has one; set runtime.name to ray",
        "needs the runtime `ray`",
    ),
    "runtime.reward_workers=1": ("local", "must be 0 with the runtime local", "more needs the runtime `ray`"),
    "judge.pool.num_replicas=2": ("local", _ONE, "more than one needs the runtime `ray`"),
    "judge.pool.total_devices=2": (
        "local",
        "and the runtime local has one; set runtime.name to ray",
        "needs the runtime `ray`",
    ),
    "observers/otel.endpoint=None": ("both", "observer otel: no endpoint", "null takes it from the environment"),
    f"model.commit={COMMIT}": _ON_HUB,  # tests/test_model_hub.py has a hub
    f"judge.model.commit={COMMIT}": _ON_HUB,
    "agents/verl": ("both", "runs a loop of verl, which is not installed here", "It needs verl beside turnwise"),
    "engines/verl": ("both", "engine verl works only inside verl", "inside verl"),
}
"""
Values and parts that a plan refuses: the runtime, the text of the refusal, and words of the reference page that say so.

A part stands for all of its options.
"""

_PROGRAM: Final = "needs a program that calls the model: plugins/gateway/tests and tests/test_external_agents.py"
_GPU: Final = "needs a GPU and a package for it"
_SERVER: Final = "needs a server"
_PACKAGE: Final = "is in no environment of this repository's quick tests; the plugin's own tests run it"
ELSEWHERE: Final[dict[str, str]] = {
    "engines/openai": _SERVER,
    "engines/sglang": _PACKAGE,
    "engines/vllm": _PACKAGE,
    "engines/transformers.product_dtype=bfloat16": "needs a processor for it: the plugin's test_fused_decoder.py",
    "engines/transformers.enable_return_routed_experts=True": "needs a mixture of experts: tests/test_router_replay.py",
    "engines/transformers.attn_implementation=flash_attention_2": _GPU,
    "engines/transformers.attn_implementation=flash_attention_3": _GPU,
    "agents/parallel_thinking.objective=exact": "needs an engine with layouts, which the scripted one has not",
    "agents/external.command": _PROGRAM,
    "agents/external.environment": _PROGRAM,
    "agents/external.inherit": _PROGRAM,
    "agents/external.bind_keys": _PROGRAM,
    "agents/external.workspace": _PROGRAM,
    "agents/task_pool": "needs agents that lease the episodes: tests/test_external_pull_example.py",
    "tools/python.sandbox.cgroup": "needs a delegated control group",
    "weight_transports/cuda_ipc": _GPU,
    "weight_transports/nccl": _GPU,
    "runtime.device=gpu": _GPU,
    "judge.pool.device=gpu": _GPU,
    "runtime.ray.address": "needs that cluster",
    "observers/wandb": "needs an account, or writes files of megabytes; the plugin's own tests run it",
    "observers/mlflow": "needs a store; the plugin's own tests run it",
    "tools/python.sandbox.tier": "depends on the kernel; the plugin's own tests run each tier that the machine has",
}
"""Values, keys and parts that are planned but not rolled out, with the reason."""
