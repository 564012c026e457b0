"""Environments of gymnasium with text, registered when this module is imported."""

import gymnasium
from gymnasium.spaces import Box, Discrete, Text


class AnyText(Text):
    """Every text, whatever its characters."""

    def contains(self, x):
        return isinstance(x, str)


class Guess(gymnasium.Env):
    """A number from 0 to 9 is to be guessed, which ``reset`` draws; half a point for its half."""

    observation_space = Text(100)
    closed = 0

    def __init__(self, last=9, text=True, named=False):
        self.action_space = Text(1, charset="0123456789") if text else Discrete(last + 1)
        if named:
            self.action_meanings = ["Low", "High"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.wanted, self.asked = str(self.np_random.integers(10)), 0
        return f"Guess a number. Its half is {int(self.wanted) / 2}.", {}

    def step(self, action):
        self.asked += 1
        right = str(action) == self.wanted
        reward = 1.0 if right else 0.25
        return "wrong", reward, right, self.asked == 3, {}

    def close(self):
        Guess.closed += 1


class Left(Guess):
    """Two actions with names; observations are numbers if it is ``blind``."""

    observation_space = Box(0, 1)

    def __init__(self, blind=False):
        super().__init__(last=1, text=False, named=True)
        self.blind = blind

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0.5 if self.blind else "Which?", {}

    def step(self, action):
        return "", float(action), True, False, {}


class Vowels(Guess):
    """A story begins; each vowel of what is added is worth a point. Any text is an action."""

    action_space = AnyText(1000)

    def __init__(self):
        pass

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        return "the " + " and ".join(self.np_random.choice(["cat", "dog", "hen"], 2)), {}

    def step(self, action):
        return "", float(sum(action.count(each) for each in "aeiou")), True, False, {}


class Moves(Guess):
    """Actions that cannot be written."""

    def __init__(self):
        self.action_space = Box(0, 1)


gymnasium.register("Guess-v0", Guess)
gymnasium.register("Left-v0", Left)
gymnasium.register("Blind-v0", Left, kwargs={"blind": True})
gymnasium.register("Vowels-v0", Vowels)
gymnasium.register("Moves-v0", Moves)
