"""A taskset of verifiers with its own environment: digits are asked for, ``rounds`` times."""

import verifiers.v1 as vf


class DigitsConfig(vf.TasksetConfig):
    rounds: int = 2


class DigitsEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Digits(vf.Taskset[vf.Task[vf.TaskData, vf.State, vf.TaskConfig], DigitsConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield vf.Task(vf.TaskData(prompt=f"Digit {number}?"), self.config.task)
            number += 1


class DigitsEnv(vf.Env[DigitsEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment, found = await interaction.turn(), 0.0
            for left in range(self.config.taskset.rounds - 1, -1, -1):
                found += segment.last_reply.isdigit()
                if left:
                    segment = await interaction.turn(f"{left} more?")
        interaction.trace.record_reward("digits", found)

    async def finalize(self, task, episode):
        episode.traces[0].record_reward("bonus", 10.0)


__all__ = ["Digits", "DigitsEnv"]
