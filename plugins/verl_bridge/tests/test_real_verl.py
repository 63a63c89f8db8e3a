"""
The real verl package: its agent loop worker runs the loop, and its replay buffer and advantages process the rows.

verl's servers need a GPU, so a scripted client replaces them. The tests run in verl's virtual environment (see the
README).
"""

import itertools
import time

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl is not installed here: see plugins/verl_bridge/README.md")

import os

import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_dir
from scripted_servers import EXAMPLE, ScriptedServers

from turnwise.config.peer_keys import PEER_KEYS, VERL
from turnwise_verl_bridge.manager import TurnwiseManager
from turnwise_verl_bridge.runs import stop_all

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

EARLIER_KEYS = {
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class",  # added with + on the command line
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",  # of verl 0.5 to 0.8
}
QUESTIONS = (("Calculate 28 * 82.", "2296"), ("Calculate 7 + 5.", "12"), ("Calculate 90 - 4.", "86"))


@pytest.fixture(scope="module")
def config():
    """Return verl's default config with the example run, three sessions per prompt and short responses."""
    import verl

    folder = os.path.join(os.path.dirname(verl.__file__), "trainer/config")
    overrides = [
        f"+turnwise.config={EXAMPLE}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.prompt_length=64",
        "actor_rollout_ref.rollout.response_length=160",
    ]
    with initialize_config_dir(config_dir=folder, version_base=None):
        return compose("ppo_trainer", overrides=overrides)


@pytest.fixture(scope="module")
def queue():
    """Return a TransferQueue on a local Ray."""
    ray.init(address="local", num_cpus=8, include_dashboard=False)  # its storage units reserve CPUs
    tq.init()
    yield tq
    tq.close()
    ray.shutdown()


@pytest.fixture
def manager(config, chat):
    """Yield a manager on scripted servers."""
    made = TurnwiseManager.create(config=config, llm_client=ScriptedServers(chat, itertools.count()))
    yield made
    made.wait()
    stop_all()


@pytest.mark.parametrize("entry", [each for each in PEER_KEYS if each.peer == VERL], ids=lambda each: each.key)
def test_the_keys_of_the_table_exist_in_verl(config, entry):
    """Errors and pages name keys that verl has, or had in a release before."""
    found = config
    for name in entry.key.split("."):
        if entry.key in EARLIER_KEYS:
            return
        assert name in found, entry.key
        found = found[name]


def rows(count=3):
    """Return the columns of a batch in the form of verl's data set."""
    chosen = [QUESTIONS[index % len(QUESTIONS)] for index in range(count)]
    columns = {
        "raw_prompt": [[{"role": "user", "content": question}] for question, _answer in chosen],
        "reward_model": [{"ground_truth": answer, "style": "rule"} for _question, answer in chosen],
        "data_source": ["calculator"] * count,
        "uid": [f"prompt-{index}-{time.time_ns()}" for index in range(count)],
        "index": list(range(count)),
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(count, dtype=object)
        arrays[name][:] = values
    return arrays


def test_v1_replay_buffer_and_advantages_process_the_rows(config, queue, manager):
    """Every session of every prompt has one row with the sampled tokens, and verl's GRPO computes its advantages."""
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
    from verl.utils import tensordict_utils as tu

    columns = rows()
    batch = tu.get_tensordict(columns)
    tu.assign_non_tensor_data(batch, "global_steps", 5)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 5} for _ in columns["uid"]]
    queue.kv_batch_put(keys=list(columns["uid"]), partition_id="train", tags=tags)
    manager.generate_sequences(batch)
    buffer = ReplayBuffer("sync", config, None, "drop", {}, poll_interval=0.2)
    sampled, _metrics = buffer.sample(global_steps=5, partition_id="train", batch_size=3)

    assert sorted(sampled.keys) == sorted(f"{uid}_{session}_0" for uid in columns["uid"] for session in range(3))
    assert {tag["min_global_steps"] for tag in sampled.tags} == {7}
    names = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "input_ids", "position_ids"]
    data = queue.kv_batch_get(keys=sampled.keys, partition_id="train", select_fields=[*names, "uid"])
    uids = np.array(data.pop("uid").tolist(), dtype=object)
    for index in range(9):
        mask, logprobs = data["response_mask"][index], data["rollout_log_probs"][index]
        assert set(logprobs[mask == 1].tolist()) == {-0.25}
        assert set(logprobs[mask == 0].tolist()) == {0.0}
        assert torch.equal(data["input_ids"][index], torch.cat([data["prompts"][index], data["responses"][index]]))
    padded = data.to_padded_tensor()
    scores = padded["rm_scores"].sum(1)
    assert sorted(scores.tolist()) == [0.0] * 3 + [1.0] * 6
    proto = DataProto(
        batch=TensorDict(
            {
                "token_level_rewards": padded["rm_scores"],
                "token_level_scores": padded["rm_scores"],
                "response_mask": padded["response_mask"],
            },
            batch_size=9,
        ),
        non_tensor_batch={"uid": uids},
    )
    done = compute_advantage_for_multi_trajectories(proto, list(sampled.keys), AdvantageEstimator.GRPO)
    advantages = done.batch["advantages"]
    assert advantages.shape == padded["response_mask"].shape
    assert not advantages[padded["response_mask"] == 0].any()
    for uid in columns["uid"]:
        own = uids == uid
        good, bad = advantages[own][scores[own] == 1], advantages[own][scores[own] == 0]
        if len(good) and len(bad):
            assert good.max() > 0 > bad.min()


def test_v1_a_failed_session_marks_its_group_as_failure(config, queue, chat):
    """The failed session has no row, and the other sessions have theirs."""

    class Faulty(ScriptedServers):
        """Fails the third request."""

        async def generate(self, *arguments, **options):
            if len(self.requests) == 2:
                self.requests.append(None)
                raise RuntimeError("the server died")
            return await super().generate(*arguments, **options)

    from verl.utils import tensordict_utils as tu

    columns = rows(1)
    batch = tu.get_tensordict(columns)
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    uid = columns["uid"][0]
    queue.kv_batch_put(keys=[uid], partition_id="train", tags=[{"is_prompt": True, "status": "pending"}])
    manager = TurnwiseManager.create(config=config, llm_client=Faulty(chat, itertools.count()))
    manager.generate_sequences(batch)
    manager.wait()
    stop_all()
    tags = {key: tag for key, tag in queue.kv_list()["train"].items() if key.startswith(uid)}
    assert tags.pop(uid)["status"] == "failure"
    assert len(tags) == 2


def test_v0_returns_a_data_proto(config, manager):
    """The DataProto has one row per input row, padded to verl's lengths, with the input's columns and the timing."""
    from verl import DataProto

    columns = {name: values.repeat(2) for name, values in rows().items()}
    prompts = DataProto(non_tensor_batch=columns, meta_info={"global_steps": 3})
    output = manager.generate_sequences(prompts)
    assert output.batch["prompts"].shape == (6, 64)
    assert output.batch["responses"].shape == (6, 160)
    assert output.batch["input_ids"].shape == output.batch["attention_mask"].shape == (6, 224)
    assert output.non_tensor_batch["uid"].tolist() == columns["uid"].tolist()
    assert output.non_tensor_batch["__num_turns__"].tolist() == [4] * 6
    assert set(output.batch["rm_scores"].sum(1).tolist()) <= {0.0, 1.0}
    assert output.meta_info["timing"]["agent_loop/slowest/response_length"] > 10


def test_the_loop_runs_in_verl_s_worker(config, chat):
    """verl finds the loop by its entry point and pads its output."""
    import asyncio
    from types import SimpleNamespace

    from verl.experimental.agent_loop import agent_loop

    assert "turnwise" in agent_loop._agent_loop_registry
    worker = object.__new__(agent_loop.AgentLoopWorker)
    from transformers import AutoTokenizer

    from turnwise import load_config

    path = str(load_config(EXAMPLE).model_spec().path)
    worker.config, worker.rollout_config = config, config.actor_rollout_ref.rollout
    worker.llm_client = ScriptedServers(chat, itertools.count())
    worker.tokenizer, worker.processor, worker.tools = AutoTokenizer.from_pretrained(path), None, []
    worker.hf_model_type, worker.dataset_cls, worker.mm_processor_kwargs = "qwen3", None, {}
    worker.teacher_client, worker.distillation_enabled, worker.reward_loop_worker_handles = None, False, None
    worker.model_config = SimpleNamespace(tokenizer=worker.tokenizer, processor=None)
    row = {name: values[0] for name, values in rows(1).items()}
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    run = worker._run_agent_loop(params, trajectory, agent_name="turnwise", trace=False, **row)
    output = asyncio.run(run)
    stop_all()
    batch = worker._postprocess([output])
    assert batch.batch["responses"].shape == (1, 160)
    mask, real = batch.batch["response_mask"][0], batch.batch["attention_mask"][0, 64:]
    assert 0 < int(mask.sum()) < int(real.sum())
    assert batch.batch["rm_scores"].sum() == 1.0
    assert batch.non_tensor_batch["max_global_steps"].tolist() == [7]
