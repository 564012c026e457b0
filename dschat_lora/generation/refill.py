"""More sequences than rows: those that wait take the rows of others that have ended."""

from collections import deque
from collections.abc import Sequence

import torch

from dschat_lora.algos.segments import to_device
from dschat_lora.generation.sampling import Responses
from dschat_lora.generation.slots import SlotRows
from dschat_lora.lora.parallel import group_of


def draw_in_slots(
    rows: SlotRows,
    prompts: Sequence[Sequence[int]],
    responses: Responses,
    *,
    most_rows: int,
    copies: int,
    needed: int,
    poll: int = 1,
) -> None:
    """Draw all sequences of ``responses``, one to each prompt; a row that has ended is refilled.

    Each ``copies`` of them belong together; where all of ``needed`` such groups have ended, the
    others are :attr:`Responses.cut`. It is looked every ``poll`` tokens which have ended.
    """
    limits = responses.limits
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    rows.reserve(min(most_rows, len(prompts)), longest)
    waiting, running = deque(range(len(prompts))), list[int]()
    drawn, last = ([0] * len(prompts) for _ in range(2))  # tokens of each sequence, and the last
    left = [copies] * (len(prompts) // copies)  # of each group

    def take(tokens: Sequence[Sequence[int]]) -> None:
        """Let the last rows go on with their tokens, and those that have ended leave."""
        first = len(running) - len(tokens)
        for row, own in reversed([*enumerate(tokens, first)]):
            sequence = running[row]
            drawn[sequence], last[sequence] = drawn[sequence] + len(own), own[-1]
            if own[-1] in responses.end_ids or drawn[sequence] == limits[sequence]:
                rows.leave(row)
                running[row] = running[-1]
                running.pop()
                left[sequence // copies] -= 1

    while left.count(0) < needed:
        if waiting and len(running) < most_rows:
            new = [waiting.popleft() for _ in range(min(most_rows - len(running), len(waiting)))]
            logits, _ = rows.join([prompts[sequence] for sequence in new], [0] * len(new))
            running += new
            sequences, none = to_device(torch.tensor([new, [0] * len(new)]), rows.device)
            first = responses.advance(logits, sequences, none, group_of(rows.model))
            take([[token] for token in first.tolist()])
            continue
        own = [last[sequence] for sequence in running]
        numbers = [drawn[sequence] for sequence in running]
        rooms = [limits[sequence] - drawn[sequence] for sequence in running]
        found = rows.draw(responses, running, numbers, own, min(poll, *rooms))
        take([each[: responses.length(each)] for each in found])
    for row in reversed(range(len(running))):
        rows.leave(row)
    responses.cut = [n in {*waiting, *running} for n in range(len(prompts))]
