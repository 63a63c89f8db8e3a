"""The plan of a run: one spec for each episode."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import Task
from turnwise.errors import ConfigError
from turnwise.runtime.plan import RolloutPlan
from turnwise.types import Capabilities


def make_task(uid):
    """Return a task."""
    return Task(messages=({"role": "user", "content": "Hi"},), uid=uid)


class NeedsGrammars:
    """The part of an agent that only engines with grammars can serve."""

    def check_engine(self, capabilities):
        if not capabilities.grammars:
            raise ConfigError("agent.form needs grammars")


def test_an_agent_may_exclude_an_engine():
    """The plan asks the agents of the config; one that no agent excludes may be anything."""
    plan = RolloutPlan(default_agent="a", agents={"a": None}, engine_checks=[NeedsGrammars()])
    plan.check_engine(SimpleNamespace(capabilities=Capabilities(grammars=True)))
    with pytest.raises(ConfigError, match=r"agent\.form needs grammars"):
        plan.check_engine(SimpleNamespace(capabilities=Capabilities()))
    RolloutPlan(default_agent="a", agents={"a": None}).check_engine(SimpleNamespace(capabilities=Capabilities()))


def test_a_column_that_no_plugin_declares():
    """It is refused before the first episode."""
    engine = SimpleNamespace(capabilities=Capabilities(columns={"routed_experts"}))
    RolloutPlan(default_agent="a", agents={"a": None}, columns={"routed_experts"}).check_engine(engine)
    plan = RolloutPlan(default_agent="a", agents={"a": None}, columns={"teacher_logprobs"})
    with pytest.raises(ConfigError, match="its results have the column 'routed_experts', which no loaded plugin decl"):
        plan.check_engine(engine)


@given(uids=st.lists(st.sampled_from("abc"), min_size=1, max_size=12), n=st.integers(1, 4))
def test_no_two_specs_are_the_same_episode(uids, n):
    """A repeated task continues the count of its rollouts, so its requests have other seeds."""
    plan = RolloutPlan(default_agent="a", agents={"a": None}, n=n)
    specs = plan.specs(map(make_task, uids), global_step=0, validation=False)
    assert [spec.task.uid for spec in specs] == [uid for uid in uids for _ in range(n)]
    for uid in set(uids):
        numbers = [spec.rollout_n for spec in specs if spec.task.uid == uid]
        assert numbers == list(range(n * uids.count(uid)))
