"""Players of a user's, as in a file of one's own."""


class BetterOfTwo:
    """Asks twice, and keeps the response of more different tokens."""

    def play(self, tasks, draw, *, key):
        pairs = zip(draw(tasks), draw(tasks), strict=True)
        kept = [max(pair, key=lambda each: len(set(each.tokens))) for pair in pairs]
        return [each.rewarded(len(set(each.tokens)) / len(each.tokens)) for each in kept]


class Hint:
    """Has each answer that ended, and only those, looked at again behind a hint."""

    reward_name = None

    def play(self, tasks, draw, *, key):
        responses = draw(tasks, limits=[4] * len(tasks))
        again = [n for n, each in enumerate(responses) if each.ended]
        while again:  # as often as this process needs
            hinted = [responses[n].read(draw.encode("ab")) for n in again]
            for n, each in zip(again, draw(hinted, limits=[3] * len(again)), strict=True):
                responses[n] = each
            again = [n for n in again if responses[n].ended and len(responses[n].tokens) < 8]
        return responses
