"""Where a text ends: tokens and strings."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from dschat_lora.models.loading import PreTrainedModel, Tokenizer, end_ids


def stop_ids(tokenizer: Tokenizer, model: PreTrainedModel, stop_tokens: Sequence[str]) -> list[int]:
    """End tokens of tokenizer, chat template, generation config and ``--stop_tokens``.

    Raises:
        ValueError: if one of ``stop_tokens`` is not one token.
    """
    known = getattr(model.generation_config, "eos_token_id", None)
    configured = (
        list(known) if isinstance(known, list | tuple) else [] if known is None else [known]
    )
    typed = []
    for text in stop_tokens:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"--stop_tokens {text!r} is {len(ids)} tokens of the actor's tokenizer, but must "
                "be one; use --stop_strings for other texts"
            )
        typed += ids
    return list(dict.fromkeys([*end_ids(tokenizer), *map(int, configured), *typed]))


def end_of_text(
    tokens: Sequence[int], stop_strings: Sequence[str], decode: Callable[[list[int]], str]
) -> int | None:
    """How many tokens it takes until the text has one of the strings; None if it never does."""

    def has_stop(count: int) -> bool:
        text = decode(list(tokens[:count]))
        return any(string in text for string in stop_strings)

    if not stop_strings or not has_stop(len(tokens)):
        return None
    return bisect_left(range(len(tokens) + 1), True, key=has_stop)
