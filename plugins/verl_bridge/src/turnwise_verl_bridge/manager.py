"""
turnwise as verl's agent loop manager (`actor_rollout_ref.rollout.agent.agent_loop_manager_class`).

verl's V1 expects `generate_sequences` to return at once and rows to appear in TransferQueue as they finish. V0 waits
for a DataProto. Episodes run in the process of verl's task runner, on verl's servers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from turnwise import EpisodeResult, RolloutManager, Task
from turnwise.errors import InfrastructureError
from turnwise_verl_bridge.rows import to_data_proto, to_queue_rows
from turnwise_verl_bridge.runs import Sampling, build_task, get_manager, vision_of


class TurnwiseManager:
    """
    Runs rollouts for verl's trainers V1 (TransferQueue) and V0 (DataProto).

    Args:
        config: verl's full config.
        llm_client: verl's server client.
        teacher_client: must be empty: distillation needs verl's own agent loops.
        reward_loop_worker_handles: ignored; the run's reward scores episodes in the rollout.
    """

    def __init__(
        self, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> None:
        if teacher_client:
            raise ValueError("teacher_client is set, but turnwise has no distillation: use verl's own agent loops")
        self.config = config
        self.llm_client = llm_client
        self._threads: list[threading.Thread] = []

    @classmethod
    def create(cls, *arguments: object, **options: object) -> TurnwiseManager:
        """Build a manager and start its rollouts, so that an invalid config fails at once."""
        manager = cls(*arguments, **options)
        manager._get_manager(validate=False)
        return manager

    def generate_sequences(self, prompts: object) -> Any:
        """Run a batch: put rows for a TensorDict into TransferQueue in the background; return a DataProto for one."""
        return self._generate_v0(prompts) if hasattr(prompts, "non_tensor_batch") else self._generate_v1(prompts)

    def wait(self) -> None:
        """Wait until the rows of all batches are in TransferQueue."""
        while self._threads:
            self._threads.pop().join()

    def _get_manager(self, *, validate: bool) -> RolloutManager:
        rollout = self.config.actor_rollout_ref.rollout
        params = rollout.val_kwargs if validate else rollout
        return get_manager(self.config, self.llm_client, Sampling.from_verl(params))

    # V0

    def _generate_v0(self, prompts: Any) -> Any:
        validate = bool(prompts.meta_info.get("validate", False))
        manager = self._get_manager(validate=validate)
        rows = [
            {name: values[index] for name, values in prompts.non_tensor_batch.items()} for index in range(len(prompts))
        ]
        tasks = [build_task(row, str(row.get("uid", index))) for index, row in enumerate(rows)]
        step = int(prompts.meta_info.get("global_steps", 0))
        results = manager.rollout(tasks, global_step=step)
        output = to_data_proto(_collate_padded(manager, results, self.config), results, vision_of(manager))
        for name, values in prompts.non_tensor_batch.items():
            output.non_tensor_batch.setdefault(name, values)
        return output

    # V1

    def _generate_v1(self, prompts: Any) -> None:
        import transfer_queue as tq

        validate = bool(_plain(prompts["validate"])) if "validate" in prompts else False
        partition = "val" if validate else "train"
        rows = [_row(prompts, index) for index in range(len(prompts))]
        for row in rows:
            tq.kv_put(key=row["uid"], partition_id=partition, tag={"status": "running"})
        thread = threading.Thread(
            target=self._fill_queue, args=(rows, partition), name="turnwise-verl-batch", daemon=True
        )
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def _fill_queue(self, rows: Sequence[dict[str, Any]], partition: str) -> None:
        """Run every prompt's group; put each finished episode into the queue, and then the status of its group."""
        import transfer_queue as tq

        manager = self._get_manager(validate=partition == "val")
        config = self.config.actor_rollout_ref.rollout
        size = config.val_kwargs.n if partition == "val" else config.n
        by_uid = {str(row["uid"]): row for row in rows}
        sizes = {uid: int(row.pop("__rollout_n__", size)) for uid, row in by_uid.items()}
        tasks: list[Task] = [build_task(row, uid) for uid, row in by_uid.items() for _ in range(sizes[uid])]
        num_pending, failed = dict(sizes), Counter[str]()
        step = int(_plain(rows[0].get("global_steps", 0)))
        try:
            for result in manager.iterate(tasks, global_step=step):
                uid = result.task.uid
                try:
                    self._put_rows(manager, result, by_uid[uid], partition)
                except InfrastructureError as error:
                    failed[uid] += 1
                    structlog.get_logger().error("episode failed", uid=uid, reason=str(error))
                num_pending[uid] -= 1
                if num_pending[uid] == 0:
                    status = "failure" if failed[uid] else "finished"
                    tq.kv_put(key=uid, partition_id=partition, tag={"status": status})
        except Exception:  # noqa: BLE001 - in a background thread: verl sees the failure as the groups' status
            structlog.get_logger().exception("the batch failed")
            for uid in (uid for uid, count in num_pending.items() if count):
                tq.kv_put(key=uid, partition_id=partition, tag={"status": "failure"})

    def _put_rows(
        self, manager: RolloutManager, result: EpisodeResult, row: Mapping[str, object], partition: str
    ) -> None:
        import transfer_queue as tq
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        rows = to_queue_rows(manager.collate([result]), result, vision_of(manager))
        tags = []
        for fields in rows:
            num_prompt, num_response = len(fields["prompts"]), len(fields["responses"])
            tags.append(
                {
                    "status": "success",
                    "prompt_len": num_prompt,
                    "response_len": num_response,
                    "seq_len": num_prompt + num_response,
                    "global_steps": result.global_step,
                    "min_global_steps": fields["extra_fields"]["min_global_steps"],
                    "max_global_steps": fields["extra_fields"]["max_global_steps"],
                }
            )
        tq.kv_batch_put(
            keys=[f"{result.task.uid}_{result.rollout_n}_{index}" for index in range(len(rows))],
            fields=list_of_dict_to_tensordict([{**row, **fields} for fields in rows]),
            tags=tags,
            partition_id=partition,
        )


def _row(prompts: Any, index: int) -> dict[str, Any]:
    """Return one row of a TensorDict as plain values, without `validate`, which belongs to the batch."""
    return {name: _plain(values, index) for name, values in prompts.items() if name != "validate"}


def _plain(values: Any, index: int | None = None) -> Any:
    """Return a value without TensorDict's wrapper."""
    from tensordict import NonTensorData, NonTensorStack

    if isinstance(values, NonTensorStack):
        return values[index or 0].data
    if isinstance(values, NonTensorData):
        return values.data
    if index is not None and hasattr(values, "shape") and len(values.shape):
        return values[index]
    return values


def _collate_padded(manager: RolloutManager, results: Sequence[EpisodeResult], config: Any) -> Any:
    """Return a batch padded to verl's prompt and response length."""
    from attrs import evolve

    rollout = config.actor_rollout_ref.rollout
    plan = manager.plan
    manager.plan = evolve(plan, prompt_length=rollout.prompt_length, response_length=rollout.response_length)
    try:
        return manager.collate(results)
    finally:
        manager.plan = plan
