"""
The trainer's side: tasks go in, agents in other processes solve and score them, and the model learns from batches.

    python examples/external_pull/train.py CONTROL_FILE
"""

import sys
import threading
from pathlib import Path

import torch  # noqa: TID253 - a script, which loads the model at once
from transformers import AutoModelForCausalLM  # noqa: TID253 - see above

from turnwise import RolloutBatch, RolloutManager, load_config
from turnwise_rollout_buffer import EpisodeGroup, TrajectoryBuffer
from turnwise_task_files import load_tasks

GROUPS_PER_BATCH = 4

control_file = Path(sys.argv[1]).absolute()
config = load_config(Path(__file__).with_name("rollout.yaml"), [f"agent.control_file={control_file}"])
tasks = load_tasks(config)
buffer = TrajectoryBuffer(group_size=config.rollout.n, max_groups=GROUPS_PER_BATCH)
policy = AutoModelForCausalLM.from_pretrained(config.model_spec().path, dtype=torch.float32)
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)


def learn(groups: list[EpisodeGroup], batch: RolloutBatch) -> None:
    """Make one step up the policy gradient, with the mean reward of its group as the baseline of an episode."""
    advantages = []
    for group in groups:
        rewards = [episode.reward or 0.0 for episode in group.episodes]
        advantages += [reward - sum(rewards) / len(rewards) for reward in rewards]
    batch = batch.as_int64()  # `gather` takes no other indices
    logits = policy(batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids).logits
    log_probs = logits[:, batch.prompt_length - 1 : -1].log_softmax(-1).gather(-1, batch.responses[..., None])[..., 0]
    weights = torch.tensor(advantages)[batch.episode_index, None] * batch.loss_mask
    loss = -(log_probs * weights).sum() / batch.loss_mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


with RolloutManager.from_config(config) as manager, manager.open(global_step=1, limit=16) as feed:

    def submit_tasks() -> None:
        """Put every task in, and wait whenever 16 episodes are open."""
        for task in tasks:
            feed.submit(task)
        feed.close()

    def collect_episodes() -> None:
        """Move finished episodes to the buffer, and wait whenever it is full."""
        for episode in feed:
            buffer.put(episode)
        buffer.close()

    for work in (submit_tasks, collect_episodes):
        threading.Thread(target=work).start()

    for number in range(len(tasks) // GROUPS_PER_BATCH):
        groups = buffer.take(GROUPS_PER_BATCH)
        episodes = [episode for group in groups for episode in group.episodes]
        batch = manager.collate(episodes)
        learn(groups, batch)
        version = manager.update_weights(policy).version  # agents continue meanwhile; each token names its version
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        mean = sum(rewards) / len(rewards)
        text = f"{len(episodes)} episodes, {len(batch)} rows, {len(rewards)} scored, mean {mean:.3f}"
        print(f"batch {number}: {text}, now version {version}")
