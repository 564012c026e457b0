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
    poll: int = 1,
    refill: int = 1,
) -> None:
    """Draw all sequences of ``responses``, one to each prompt; rows that have ended are refilled.

    It is looked every ``poll`` tokens which have ended, for which alone the host waits. Prompts are
    read once ``refill`` rows are free, or all that wait have one.
    """
    limits = responses.limits
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    rows.reserve(min(most_rows, len(prompts)), longest)
    waiting, running = deque(range(len(prompts))), list[int]()
    drawn, read = ([0] * len(prompts) for _ in range(2))  # tokens of each, and those looked at

    def look(texts: Sequence[Sequence[int]], first: Sequence[int]) -> None:
        """Read what rows have drawn, from those numbers of tokens on; let ended ones leave."""
        for row in reversed(range(len(running))):
            sequence = running[row]
            own = texts[row][read[sequence] - first[row] :]
            own = own[: responses.length(own)]
            drawn[sequence] = read[sequence] = read[sequence] + len(own)
            if drawn[sequence] == limits[sequence] or (own and own[-1] in responses.end_ids):
                rows.leave(row)
                running[row] = running[-1]
                running.pop()

    while waiting or running:
        free, count = most_rows - len(running), poll
        if waiting and (not running or free >= min(refill, len(waiting))):
            new = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            logits, _ = rows.join([prompts[sequence] for sequence in new], [0] * len(new))
            sequences, none = to_device(torch.tensor([new, [0] * len(new)]), rows.device)
            responses.advance(logits, sequences, none, group_of(rows.model))
            for sequence in new:
                drawn[sequence] = 1
            running += new
            count -= 1
        numbers = [drawn[sequence] for sequence in running]
        rooms = [limits[sequence] - drawn[sequence] for sequence in running]
        texts = rows.draw(responses, running, numbers, min(count, *rooms))
        look(texts, [number - 1 for number in numbers])
