"""The plan of a run: one spec for each episode."""

from hypothesis import given
from hypothesis import strategies as st

from turnwise import Task
from turnwise.runtime.plan import RolloutPlan


def make_task(uid):
    """Return a task."""
    return Task(messages=({"role": "user", "content": "Hi"},), uid=uid)


@given(uids=st.lists(st.sampled_from("abc"), min_size=1, max_size=12), n=st.integers(1, 4))
def test_no_two_specs_are_the_same_episode(uids, n):
    """A repeated task continues the count of its rollouts, so its requests have other seeds."""
    plan = RolloutPlan(default_agent="a", agents={"a": None}, n=n)
    specs = plan.specs(map(make_task, uids), global_step=0, validation=False)
    assert [spec.task.uid for spec in specs] == [uid for uid in uids for _ in range(n)]
    for uid in set(uids):
        numbers = [spec.rollout_n for spec in specs if spec.task.uid == uid]
        assert numbers == list(range(n * uids.count(uid)))
