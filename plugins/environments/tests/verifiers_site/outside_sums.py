"""A taskset of verifiers as a stranger writes it: sums, with a tool that adds and a reward at the end."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """The right answer."""

    answer: int


class AddTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """A server with one tool."""

    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumConfig(vf.TaskConfig):
    """The options of a task."""

    tools: bool = False
    broken: bool = False


class SumTask(vf.Task[SumData, vf.State, SumConfig]):
    """A sum."""

    @classmethod
    def toolsets(cls, config):
        """Serve the tool where it is asked for."""
        return [AddTools(vf.ToolsetConfig())] if config.tools else []

    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        """Compare the last reply with the answer."""
        if self.config.broken:
            raise KeyError("answer")
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        """Count the replies."""
        return float(len(trace.assistant_messages))


class SumTasksetConfig(vf.TasksetConfig):
    """The options of the taskset."""

    task: SumConfig = SumConfig()


class SumTaskset(vf.Taskset[SumTask, SumTasksetConfig]):
    """Four sums."""

    def load(self):
        """Return them in order."""
        for number in range(4):
            data = SumData(prompt=f"What is {number} + 1?", system_prompt="Answer with a number.", answer=number + 1)
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    AddTools.run()
