"""Trains an example with TRL, on its own rollouts or on turnwise's, for `side_by_side.py`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
Record = dict[str, Any]


def train_with_trl(way: str, config: Path, overrides: Sequence[str], out: Path) -> None:
    """Train with TRL, with its own rollout or with turnwise's; write the metrics and the model to a folder."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from turnwise_grpo_trainer.learner.optimization import lr_factor
    from turnwise_grpo_trainer.train_setup import read_setup
    from turnwise_rollout_buffer.task_stream import TaskStream
    from turnwise_trl_bridge.rollouts import UID

    setup = read_setup(str(config), overrides)
    train, path = setup.train, str(setup.model.path)
    updates = count_updates(setup)
    stream = TaskStream(setup.tasks, setup.run.rollout.seed, setup.shares)
    steps = [stream.take(train.tasks_per_step) for _ in range(train.num_steps)]
    rows = [
        {
            "prompt": list(map(dict, task.messages)),
            UID: task.uid,
            "truth": task.ground_truth,
            "extra": json.dumps(task.extra),
        }
        for tasks in steps
        for task in tasks
    ]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train.optimizer.lr,
        betas=train.optimizer.betas,
        eps=train.optimizer.eps,
        weight_decay=train.optimizer.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: lr_factor(train.optimizer, update // updates, train.num_steps)
    )
    options = {
        "model": model,
        "args": build_arguments(setup, out),
        "train_dataset": Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(path, padding_side="left"),
        "callbacks": [build_step_log(out, updates, train.tasks_per_step * setup.group_size)],
        "optimizers": (optimizer, schedule),
    }
    trainer = run_own_loop(setup, options) if way == "trl" else run_bridge(setup, options)
    trainer.save_model(str(out / "model"))


def count_updates(setup: Any) -> int:
    """Return the optimizer steps of a training step."""
    episodes = setup.train.tasks_per_step * setup.group_size
    size = setup.train.algorithm.ppo_mini_batch_size or episodes
    if episodes % size:
        sys.exit(f"{episodes} episodes do not divide into mini-batches of {size}")
    updates: int = episodes // size
    return updates


def build_arguments(setup: Any, out: Path) -> Any:
    """Return the settings of the config under TRL's names."""
    from trl import GRPOConfig

    rollout, algorithm, updates = setup.run.rollout, setup.train.algorithm, count_updates(setup)
    episodes = setup.train.tasks_per_step * setup.group_size
    turns = setup.run.agent.options.get("max_assistant_turns")
    return GRPOConfig(
        output_dir=str(out),
        max_steps=setup.train.num_steps * updates,
        per_device_train_batch_size=episodes // updates,
        gradient_accumulation_steps=1,
        generation_batch_size=episodes,
        num_generations=setup.group_size,
        shuffle_dataset=False,  # the rows have the order of `turnwise train`
        temperature=rollout.sampling.temperature,
        max_completion_length=rollout.response_length,
        generation_kwargs={"max_new_tokens": rollout.sampling.max_tokens or rollout.response_length},
        max_tool_calling_iterations=None if turns is None else turns - 1,
        beta=0.0,
        loss_type="bnpo",
        scale_rewards="group",
        epsilon=algorithm.clip_ratio_low,
        epsilon_high=algorithm.clip_ratio_high,
        max_grad_norm=setup.train.optimizer.grad_clip,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=rollout.seed,
        logging_steps=updates,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def run_own_loop(setup: Any, options: Record) -> Any:
    """Train with TRL's own rollout, and return the trainer."""
    from trl import GRPOTrainer

    parts = (setup.run.agent.name, setup.run.reward.name)
    if parts == ("tool_agent", "exact_match"):
        own = use_calculator(options["processing_class"])
    elif parts == ("single_turn", "reasoning_gym"):
        own = score_with_reasoning_gym(setup.run.reward.options)
    else:
        sys.exit(f"TRL has no counterpart here for agent {parts[0]} with reward {parts[1]}")
    trainer = GRPOTrainer(**own, **options)
    trainer.train()
    return trainer


def use_calculator(tokenizer: Any) -> Record:
    """Return the calculator as a tool of TRL, and the reward `exact_match`."""
    from trl.chat_template_utils import qwen3_template

    from turnwise_calculator_demo.episodes import TOOL_NAME, respond
    from turnwise_calculator_demo.rewards import exact_match

    def calculator(expression: str) -> str:
        """
        Computes one arithmetic operation, for example "23 + 48".

        Args:
            expression: Two numbers and one of + - * / // % ** between them.
        """
        return respond(expression)

    def score(completions: Sequence[Sequence[Record]], truth: Sequence[str], **_: Any) -> list[float]:
        # As the reward `exact_match`: an episode that ends with a call or a tool message has no answer.
        ends = [completion[-1] for completion in completions]
        answers = [end["content"] if end["role"] == "assistant" and not end.get("tool_calls") else "" for end in ends]
        return [exact_match(answer, each) for answer, each in zip(answers, truth, strict=True)]

    assert calculator.__name__ == TOOL_NAME
    # TRL knows the parser of some chat templates by their text. The model's calls have the format of Qwen3.
    tokenizer.response_template = qwen3_template
    return {"reward_funcs": score, "tools": [calculator]}


def score_with_reasoning_gym(reward: Record) -> Record:
    """Return the reward `reasoning_gym` with its options in a config."""
    from turnwise_reasoning_gym.answers import find_answer
    from turnwise_reasoning_gym.processes import GymProcess

    scorer = GymProcess("score", str(reward["timeout_s"]))

    def score_one(text: str, truth: str, extra: str) -> float:
        answer = find_answer(text, reward["answer"])
        if not answer.text:
            return 0.0
        request = {"ground_truth": truth, "answer": answer.text, "extracted": answer.extracted}
        return float(str(scorer.ask({**json.loads(extra)["reasoning_gym"], **request})["score"]))

    def score(
        completions: Sequence[Sequence[Record]], truth: Sequence[str], extra: Sequence[str], **_: Any
    ) -> list[float]:
        texts = [str(completion[-1]["content"]) for completion in completions]
        return [score_one(*each) for each in zip(texts, truth, extra, strict=True)]

    return {"reward_funcs": score}


def run_bridge(setup: Any, options: Record) -> Any:
    """Train with TRL on turnwise's rollouts, and return the trainer."""
    from turnwise_trl_bridge import Rollouts, TurnwiseGRPOTrainer

    rollouts = Rollouts.from_config(setup.run, setup.tasks)
    with rollouts.manager:
        trainer = TurnwiseGRPOTrainer(rollouts=rollouts, **options)
        trainer.train()
    return trainer


def build_step_log(out: Path, updates: int, episodes: int) -> Any:
    """Return a callback that writes a line of metrics for each step, under the names of `turnwise train`."""
    from transformers import TrainerCallback

    class StepLog(TrainerCallback):
        wall = cpu = total_wall = total_cpu = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
                self.total_wall, self.total_cpu = self.total_wall + self.wall, self.total_cpu + self.cpu

        def on_log(self, args: Any, state: Any, control: Any, logs: Record | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                write_lines(out / METRICS, [self.line(state.global_step // updates, logs)])

        def line(self, step: int, logs: Record) -> Record:
            return {
                "step": step,
                "reward/mean": logs["reward"],
                "tokens/action": logs["completions/mean_length"] * episodes,
                "tools/per_episode": logs.get("tools/call_frequency"),
                "actor/lr": logs["learning_rate"],
                "actor/grad_norm": logs["grad_norm"],
                "seconds/step": self.wall,
                "seconds/train": self.total_wall,
                "seconds/train_cpu": self.total_cpu,
            }

    return StepLog()


def write_lines(path: Path, lines: Iterable[Record]) -> None:
    """Append JSON lines to a file."""
    with path.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
