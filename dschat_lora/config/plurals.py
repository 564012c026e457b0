"""Numbers with their nouns."""


def counted(count: int, noun: str) -> str:
    """The number and its noun, such as "1 step" and "2 steps"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
