"""A taskset of verifiers whose rewards differ between the replies of an untrained model."""

import verifiers.v1 as vf


class LengthTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """A question that any reply answers."""

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        """Prefer short replies."""
        return 1.0 / (1.0 + len(trace.last_reply))


class LengthTaskset(vf.Taskset[LengthTask, vf.TasksetConfig]):
    """Two questions."""

    def load(self):
        """Return them in order."""
        for number in range(2):
            yield LengthTask(vf.TaskData(prompt=f"Say something short, {number}."), self.config.task)


__all__ = ["LengthTaskset"]
