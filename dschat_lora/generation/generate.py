"""Batched decoding of a causal language model, one token a step."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from dschat_lora.generation.batch_state import (
    CachedRows,
    RecomputedRows,
    Rows,
    cuda_graphs,
    in_shards,
    takes_cache,
)
from dschat_lora.generation.fast_kernels import fast_attention, fast_linears
from dschat_lora.generation.sampling import Responses, Sampling
from dschat_lora.lora.parallel import group_of, whole_sequences

GPU_POLL = 16  # steps between two checks of which sequences have ended


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seeds: Sequence[Sequence[int]],
    eos_ids: Collection[int],
    pad_id: int,
    device: torch.device,
    keep_going: Callable[[bool], bool] | None = None,
) -> list[list[list[int]]]:
    """Responses to each prompt, each up to and including its end-of-sequence token.

    A response depends on the model, the prompt, its seed and ``sampling`` alone, not on the rest
    of the batch, up to the rounding of the model's logits. The model is in evaluation mode, with
    adapters unmerged, and its positions hold prompt and response together. ``pad_id`` is any token.

    Where every rank must run the same number of forward passes, as sharded weights need it,
    ``keep_going`` is called once a step with whether this rank is done, and returns whether any
    rank is not. Call on every rank then.

    Raises:
        ValueError: if a prompt is empty, or the seeds are not as many for each prompt.
    """
    copies = _copies(prompts, seeds)
    flat = [seed for each in seeds for seed in each]
    responses = Responses(flat, sampling, eos_ids=eos_ids, device=device)
    respond(model, prompts, responses, pad_id=pad_id, device=device, keep_going=keep_going)
    found = responses.tokens()
    return [found[i : i + copies] for i in range(0, len(found), copies)]


@torch.no_grad()
def respond(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Responses,
    *,
    pad_id: int,
    device: torch.device,
    keep_going: Callable[[bool], bool] | None = None,
) -> None:
    """Fill ``responses``, as many to each prompt, prompt after prompt; arguments as :func:`decode`.

    Raises:
        ValueError: if a prompt is empty.
    """
    _check_fits(model, prompts, responses.limit)
    if not prompts and keep_going is None:
        return
    copies = responses.size // max(1, len(prompts))
    rows = _rows(model, prompts, responses, copies=copies, pad_id=pad_id, device=device)
    with _inference_kernels(model):
        _run(model, rows, responses, pad_id=pad_id, device=device, keep_going=keep_going)


@contextmanager
def _inference_kernels(model: PreTrainedModel) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(whole_sequences(model))
        if not in_shards(model):
            stack.enter_context(fast_linears(model))
        if takes_cache(model):
            stack.enter_context(fast_attention(model))
        yield


def _run(
    model: PreTrainedModel,
    rows: Rows | None,
    responses: Responses,
    *,
    pad_id: int,
    device: torch.device,
    keep_going: Callable[[bool], bool] | None,
) -> None:
    """Choose tokens until every sequence has ended, here and, with ``keep_going``, elsewhere."""
    chosen = 0
    while True:
        if rows is None:
            # One token, in step with ranks that are not done.
            model(input_ids=torch.tensor([[pad_id]], device=device), use_cache=False)
        elif chosen == 0:
            rows.start()
        else:
            rows.step()
        chosen += 1
        if rows is not None:
            rows = _unfinished(rows, responses, chosen, device)
        done = rows is None
        if not (keep_going(done) if keep_going else not done):
            break


def _copies(prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]]) -> int:
    """Number of responses to each prompt."""
    counts = {len(each) for each in seeds}
    if len(seeds) != len(prompts) or len(counts) > 1 or 0 in counts:
        raise ValueError(
            f"seeds must be one list for each of {len(prompts)} prompts, all of one length of at "
            f"least 1; found {len(seeds)} lists of lengths {sorted(counts)}"
        )
    return max(counts, default=1)


def _check_fits(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    assert not model.training, "responses are decoded in evaluation mode"
    empty = [index for index, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        raise ValueError(f"prompt {empty[0]} is empty; a response needs a token to follow")
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max((len(prompt) for prompt in prompts), default=0)
    assert limit is None or longest + max_new_tokens <= limit, (
        f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's "
        f"{limit} positions"
    )


def _rows(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Responses,
    *,
    copies: int,
    pad_id: int,
    device: torch.device,
) -> Rows | None:
    if not prompts:
        return None
    if not takes_cache(model):
        return RecomputedRows(
            model, prompts, responses, copies=copies, pad_id=pad_id, device=device
        )
    on_gpu = device.type == "cuda"
    # Collectives are not captured in graphs.
    replays = on_gpu and not in_shards(model) and group_of(model) is None
    return CachedRows(
        model,
        prompts,
        responses,
        copies=copies,
        pad_id=pad_id,
        device=device,
        buckets=on_gpu,
        record=cuda_graphs() if replays else None,
    )


def _unfinished(rows: Rows, responses: Responses, chosen: int, device: torch.device) -> Rows | None:
    """The rows without finished sequences; None where all have finished.

    On a GPU checked every few steps only, since reading it waits for the device.
    """
    if chosen == responses.limit:
        return None
    if device.type == "cuda" and chosen % GPU_POLL:
        return rows
    finished = responses.finished.tolist()
    alive = [not finished[sequence] for sequence in rows.sequences]
    if not any(alive):
        return None
    rows.keep(alive)
    return rows
