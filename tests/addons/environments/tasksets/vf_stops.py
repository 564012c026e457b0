"""A taskset of verifiers whose task stops its agent."""

import verifiers.v1 as vf


class Stops(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return True


class Stopping(vf.Taskset[Stops, vf.TasksetConfig]):
    def load(self):
        yield Stops(vf.TaskData(prompt="?"), self.config.task)


__all__ = ["Stopping"]
