"""A rollout engine of one's own: it draws at random."""

import random

from dschat_lora.rl.draw.engine import Drawn


class Engine:
    def draw(self, asked, sampling):
        responses = []
        for row in asked:
            dice = random.Random(row.seed)
            responses.append(
                Drawn([dice.randrange(3, 61) for _ in range(dice.randint(1, row.limit))])
            )
        return lambda: responses


class Known(Engine):
    """The same, with the log-probabilities of what it draws."""

    def draw(self, asked, sampling):
        drawn = super().draw(asked, sampling)()
        return lambda: [Drawn(each.tokens, [-4.0] * len(each.tokens)) for each in drawn]
