"""
The trainer's side: tasks go in, agents in other processes solve and score them, and batches come out.

    python examples/external_pull/train.py CONTROL_FILE
"""

import sys
import threading
from pathlib import Path

from turnwise import RolloutManager, load_config
from turnwise.runtime.build import load_tasks
from turnwise_rollout_buffer import TrajectoryBuffer

GROUPS_PER_BATCH = 4

config = load_config(Path(__file__).with_name("rollout.yaml"), [f"agent.pull.control_file={sys.argv[1]}"])
tasks = load_tasks(config)
buffer = TrajectoryBuffer(group_size=config.rollout.n, max_groups=GROUPS_PER_BATCH)

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
        # Here a trainer computes advantages and losses from the batch, and calls `manager.update_weights`.
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        mean = sum(rewards) / len(rewards)
        print(f"batch {number}: {len(episodes)} episodes, {len(batch)} rows, {len(rewards)} scored, mean {mean:.3f}")
