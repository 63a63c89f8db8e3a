"""Messages of the driver to its workers."""

from collections import Counter

from attrs import define, field

from turnwise import Task
from turnwise.config.runtime import RuntimeConfig
from turnwise.record.spec import EpisodeSpec
from turnwise.runtime.ray.workers import WorkerGroup
from turnwise.runtime.remote.dispatch import EpisodeDispatcher


@define
class RecordingHandle:
    """A handle of an actor that counts the messages of each method."""

    messages: Counter = field(factory=Counter)

    def __getattr__(self, name):
        messages = self.messages

        class Method:
            """A remote method."""

            def options(self, **_options):
                return self

            def remote(self, *_arguments):
                messages[name] += 1

        return Method()


def test_an_episode_is_one_message():
    """A submitted episode is a message to its worker, and none to the others: a run may have thousands of workers."""
    config = RuntimeConfig(name="ray", num_workers=50)
    dispatcher = EpisodeDispatcher()
    group = WorkerGroup(blueprint=None, config=config, cluster=None, pools={}, dispatcher=dispatcher)
    for slot in group.slots:
        slot.handle = RecordingHandle()
    spec = EpisodeSpec(task=Task(messages=({"role": "user", "content": "hi"},), uid="a"), agent_name="one_turn")
    dispatcher.submit([(0, spec)], lambda _number, _result: None)
    group.distribute()
    sent = sum((slot.handle.messages for slot in group.slots), Counter())
    assert sent == {"submit": 1}
