"""Reward functions that options of tests name."""


def length(responses, token_ids):
    """Minus the number of tokens."""
    return [-float(len(each)) for each in token_ids]


def ended(responses, ended):
    """1 where a response ended by itself, else 0."""
    return [float(each) for each in ended]
