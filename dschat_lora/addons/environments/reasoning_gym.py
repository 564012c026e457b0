"""Tasks of ``reasoning-gym``."""

from typing import Any, ClassVar

from reasoning_gym import create_dataset

from dschat_lora.data.messages import Message


class ReasoningGym:
    """A task of ``reasoning-gym``, whose questions have no end and are scored by itself.

    Episode ``n`` has the task's question ``n``.
    """

    _tasks: ClassVar[dict[str, Any]] = {}

    def __init__(self, task: str) -> None:
        """Make the task's data set.

        Raises:
            ValueError: if there is no such task.
        """
        if task not in self._tasks:
            try:
                self._tasks[task] = create_dataset(task, size=2**31, seed=0)
            except ValueError as error:
                raise ValueError(f"--environment reasoning_gym:{task}: {error}") from error
        self._task = self._tasks[task]
        self.reward_name = task

    def reset(self, episode: int) -> str:
        """The question."""
        self._entry = self._task[episode]
        return str(self._entry["question"])

    def step(self, message: Message) -> tuple[None, float]:
        """The end of the episode, and the score of its answer."""
        answer = message["content"].strip()
        return None, float(self._task.score_answer(answer=answer, entry=self._entry))
