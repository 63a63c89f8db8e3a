"""The conformance suites of the command and of the registration of the agent."""

import pytest

from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.pool.sqlite_store import SqliteStore
from turnwise_task_pool.pool.store import PoolTask
from turnwise_testing import CommandExample, CommandSuite
from turnwise_testing.suites.plugin import PluginSuite


class TestPool(CommandSuite):
    """The command `pool`."""

    entry_point = "task_pool"
    module = "turnwise_task_pool"
    registered = "pool"

    @pytest.fixture
    def examples(self, tmp_path):
        file = tmp_path / "pool.sqlite"
        store = SqliteStore(file)
        store.put(PoolTask(uid="a"), capacity=1)
        store.close()
        return (
            CommandExample(arguments=["status", str(file)], output="ready      1"),
            CommandExample(arguments=["export", str(file)], output=""),
        )


class TestTaskPool(PluginSuite):
    """The agent `task_pool`, whose episodes need agents in other processes."""

    entry_point = "task_pool"
    module = "turnwise_task_pool"
    hook = "register_agents"
    registered = "task_pool"

    @pytest.fixture
    def config(self):
        return PoolConfig(control_file="control.json")
