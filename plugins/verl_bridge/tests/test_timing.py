"""Times of a batch under verl's names."""

import numpy as np

from turnwise import EpisodeResult, Status, Task, Trajectory
from turnwise.types import EpisodeMetrics
from turnwise_verl_bridge.timing import batch_timing


def make_result(num_response_tokens, **seconds):
    """Return an episode with two prompt tokens and the given times."""
    trajectory = Trajectory(np.asarray([1, 2], np.int32))
    ids = np.arange(num_response_tokens, dtype=np.int32)
    trajectory.add_action(ids, np.zeros(num_response_tokens, np.float32), 0)
    task = Task(messages=({"role": "user", "content": "a"},), uid="a")
    return EpisodeResult(
        task=task, status=Status.COMPLETED, trajectories=(trajectory,), metrics=EpisodeMetrics(**seconds)
    )


def test_times_and_the_slowest_episode():
    """Every kind of seconds has min, max and mean; the slowest episode has the largest sum of the three kinds."""
    results = [
        make_result(3, llm_s=3.0, tool_s=0.0, reward_s=0.0),
        make_result(5, llm_s=1.0, tool_s=2.0, reward_s=0.5),
    ]
    assert batch_timing(results) == {
        "agent_loop/generate_sequences/min": 1.0,
        "agent_loop/generate_sequences/max": 3.0,
        "agent_loop/generate_sequences/mean": 2.0,
        "agent_loop/slowest/generate_sequences": 1.0,
        "agent_loop/tool_calls/min": 0.0,
        "agent_loop/tool_calls/max": 2.0,
        "agent_loop/tool_calls/mean": 1.0,
        "agent_loop/slowest/tool_calls": 2.0,
        "agent_loop/compute_score/min": 0.0,
        "agent_loop/compute_score/max": 0.5,
        "agent_loop/compute_score/mean": 0.25,
        "agent_loop/slowest/compute_score": 0.5,
        "agent_loop/slowest/prompt_length": 2.0,
        "agent_loop/slowest/response_length": 5.0,
    }


def test_an_empty_batch_has_no_times():
    """No episodes give an empty mapping."""
    assert batch_timing([]) == {}
