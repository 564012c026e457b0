"""A server of OpenEnv at a port: a guessing game, or one whose fields must be named."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, create_fastapi_app
from openenv.core.env_server.types import State


class Said(Action):
    text: str
    note: str = ""


class Heard(Observation):
    reply: str | None = None
    left: int = 0


class Several(Action):
    text: str = ""
    thought: str = ""


class SeveralHeard(Heard):
    more: str = "more"


class Game(Environment):
    """A number from 0 to 9 is to be guessed in two tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    heard = Heard

    def reset(self, seed=None, episode_id=None):
        self.wanted, self.left = str(random.Random(seed).randrange(10)), 2
        return self.heard(reply=f"Guess {self.wanted}.", left=2)

    def step(self, action, timeout_s=None):
        self.left -= 1
        right = action.text == self.wanted
        ended = right or not self.left
        reward = 1.0 if right else 0.25 if ended else None
        return self.heard(reply="wrong", left=self.left, done=ended, reward=reward)

    @property
    def state(self):
        return State()


class SeveralGame(Game):
    heard = SeveralHeard


if __name__ == "__main__":
    port, kind, most = sys.argv[1:]
    kinds = {"one": (Game, Said, Heard), "several": (SeveralGame, Several, SeveralHeard)}
    app = create_fastapi_app(*kinds[kind], max_concurrent_envs=int(most))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="error")
