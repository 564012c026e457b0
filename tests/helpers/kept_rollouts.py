"""Responses of step 3, as a run keeps them."""

from dschat_lora.report.rollout_file import as_member, open_rollouts


class Log:
    """As much of a run's log as is asked for."""

    def __init__(self):
        self.failure, self.said = None, []

    def say(self, text):
        self.said.append(text)


def row(iteration, prompt="p", response="r", reward=0.0, **more):
    return {
        "iteration": iteration,
        "prompt": prompt,
        "response": response,
        "ended": True,
        "rewards": {"f": reward},
        "reward": reward,
        "advantage": 0.5,
        "kl": 0.25,
        "length": 3,
        **more,
    }


def kept(directory, *iterations, source=None, log=None, active=True):
    file = open_rollouts(directory, log or Log(), active=active, source=source)
    for iteration in iterations:
        file.append(as_member([row(iteration, response=f"{iteration}-{n}") for n in range(2)]))
    return file
