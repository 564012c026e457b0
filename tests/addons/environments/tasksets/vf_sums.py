"""A taskset of verifiers: three sums, with a tool that adds, one answer each."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def used_tool(self, trace) -> float:
        return float(any(each.content == self.data.answer for each in trace.tool_messages))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(3):
            data = SumData(prompt=f"{n} plus {n}?", system_prompt="Add.", answer=str(2 * n))
            yield Sum(data, self.config.task)


__all__ = ["Sums"]
