"""Batched decoding of a causal language model, one token a step."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count

import torch
from transformers import PreTrainedModel

from dschat_lora.generation.batch_state import CachedRows, Kept, Rows
from dschat_lora.generation.cuda_graphs import DecodeStep, graphs_for
from dschat_lora.generation.fast_attention import fast_attention
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.forward import in_shards, takes_cache
from dschat_lora.generation.recomputed_rows import RecomputedRows
from dschat_lora.generation.sampling import Responses, Sampling, undrawn_reason
from dschat_lora.lora.model import adapter_layers
from dschat_lora.lora.parallel import whole_sequences
from dschat_lora.models.causal_lm import fp32_logits

GPU_POLL = 16  # steps between two checks of which sequences have ended
KeepGoing = Callable[[bool], bool]


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seeds: Sequence[Sequence[int]],
    eos_ids: Collection[int],
    pad_id: int,
    device: torch.device,
    keep_going: KeepGoing | None = None,
) -> list[list[list[int]]]:
    """Responses to each prompt, by a :class:`Decoder` of its own.

    Raises:
        ValueError: if a token cannot be drawn.
    """
    decoder = Decoder(model, eos_ids=eos_ids, pad_id=pad_id, device=device)
    responses = decoder(prompts, sampling, seeds=seeds, keep_going=keep_going)
    if any(responses.undrawn()):
        raise ValueError(undrawn_reason(()))
    found = responses.tokens()
    copies = max(1, len(found) // max(1, len(prompts)))
    return [found[i : i + copies] for i in range(0, len(found), copies)]


class Decoder:
    """Decodes with one model, and on a GPU keeps from call to call what a call needs.

    That are the key-value cache, 16-bit copies of adapters and captured graphs, which refer to
    weights by their addresses. They are made anew where those have moved, or a larger batch comes.

    Args:
        model: in evaluation mode when it is called, with adapters unmerged.
        eos_ids: any of them ends a response.
        pad_id: any token.
        device: of the model.
        largest: (rows, columns) of the largest batch that will come, as far as it is known;
            columns count prompt and response.
        merged: decode with adapters added to copies of the weights, which takes fewer operations
            and the memory of the copies; 16-bit weights are rounded anew.
        unpacked: whether 4-bit weights are unpacked once, see :class:`FastLinears`.
        retains: keep what a call has computed, for the ``prefixes`` of the next one.
        record: see :class:`CachedRows`; by default CUDA graphs on a GPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Collection[int],
        pad_id: int,
        device: torch.device,
        largest: tuple[int, int] = (0, 0),
        merged: bool = False,
        unpacked: bool | None = None,
        retains: bool = False,
        record: Callable[[DecodeStep], DecodeStep] | None = None,
    ) -> None:
        self._model, self._eos_ids, self._pad_id = model, frozenset(eos_ids), pad_id
        self._device, self._largest, self._merged = device, largest, merged
        self._unpacked = unpacked
        self._record, self._retains = record, retains
        self._keeps = device.type == "cuda" or record is not None
        self._weights: object = None
        self.release()

    def release(self) -> None:
        """Free what is kept."""
        self._rows: CachedRows | None = None
        self._linears: FastLinears | None = None
        self._responses: dict[tuple[Sampling, bool, bool], Responses] = {}

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[Sequence[int]],
        limits: Sequence[int] | None = None,
        prefixes: Sequence[tuple[int, int]] | None = None,
        keep_logprobs: bool = False,
        keep_going: KeepGoing | None = None,
    ) -> Responses:
        """As many responses to each prompt as it has seeds, prompt after prompt.

        ``limits``, one for each prompt, bound the tokens of its responses further than
        ``sampling`` does. ``prefixes`` name, for each, a sequence of the last call, prompt and
        response, and how many tokens of it the prompt begins with: not its last one, which was
        not computed. No weight may have changed since.

        Each is up to and including its end-of-sequence token, unless no token could be drawn
        (:meth:`Responses.undrawn`), and depends on the model, the
        prompt, its seed and ``sampling`` alone, not on the rest of the batch, up to the rounding
        of the model's logits. The model's positions hold prompt and response together. What is
        returned holds until the next call.

        Where every rank must run the same number of forward passes, as sharded weights need it,
        ``keep_going`` is called once a step with whether this rank is done, and returns whether
        any rank is not. Call on every rank then.

        Raises:
            ValueError: if a prompt is empty, or the seeds are not as many for each prompt.
        """
        copies = _copies(prompts, seeds)
        bounds = [min(sampling.max_new_tokens, n) for n in limits or ()]
        _check_fits(self._model, prompts, bounds or [sampling.max_new_tokens] * len(prompts))
        flat = [seed for each in seeds for seed in each]
        columns = max(map(len, prompts), default=0) + max(bounds, default=sampling.max_new_tokens)
        before = self._rows if self._retains else None
        if not self._is_ready(len(flat), columns):
            self.release()
        responses = self._responses_for(len(flat), sampling, keep_logprobs, limits is not None)
        responses.start(flat, [n for n in bounds for _ in range(copies)] or None)
        if not prompts and keep_going is None:
            return responses
        rows = self._rows_for(len(flat), columns) if prompts else None
        with self._kernels():
            if rows is not None:
                kept = None if prefixes is None or before is None else Kept(before, prefixes)
                rows.start(prompts, responses, copies=copies, kept=kept)
            self._run(rows, responses, keep_going)
        return responses

    def _is_ready(self, rows: int, columns: int) -> bool:
        """Whether what is kept, if anything, serves this batch and the weights as they are now."""
        before, self._weights = self._weights, _weights_of(self._model)
        fits = self._rows is None or self._rows.holds(rows, columns)
        fits = fits and all(each.capacity >= rows for each in self._responses.values())
        return self._keeps and fits and before == self._weights

    def _responses_for(
        self, size: int, sampling: Sampling, keep_logprobs: bool, ragged: bool
    ) -> Responses:
        key = (sampling, keep_logprobs, ragged)
        found = self._responses.get(key)
        if found is None:
            found = self._responses[key] = Responses(
                max(size, self._largest[0] if self._keeps else 0),
                sampling,
                eos_ids=self._eos_ids,
                device=self._device,
                keep_logprobs=keep_logprobs,
                ragged=ragged,
            )
        return found

    def _rows_for(self, rows: int, columns: int) -> Rows:
        if not takes_cache(self._model):
            return RecomputedRows(self._model, pad_id=self._pad_id, device=self._device)
        if self._rows is None:
            capacity = rows, columns
            if self._keeps:
                capacity = max(rows, self._largest[0]), max(columns, self._largest[1])
            self._rows = CachedRows(
                self._model,
                capacity,
                pad_id=self._pad_id,
                device=self._device,
                buckets=self._keeps,
                retains=self._retains,
                record=self._record or graphs_for(self._model, self._device),
            )
        return self._rows

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(whole_sequences(self._model))
            if not in_shards(self._model):
                if self._linears is None:
                    self._linears = FastLinears(
                        self._model, merged=self._merged, unpacked=self._unpacked
                    )
                    self._weights = _weights_of(self._model)  # some may have been moved
                stack.enter_context(self._linears.in_use())
            stack.enter_context(fp32_logits(self._model))
            if takes_cache(self._model):
                stack.enter_context(fast_attention(self._model))
            yield

    def _run(self, rows: Rows | None, responses: Responses, keep_going: KeepGoing | None) -> None:
        """Choose tokens until every sequence has ended, here and, with ``keep_going``, elsewhere.

        The rows have chosen their first one.
        """
        for chosen in count(1):
            if rows is None:
                # One token, in step with ranks that are not done.
                ids = torch.tensor([[self._pad_id]], device=self._device)
                self._model(input_ids=ids, use_cache=False)
            elif chosen > 1:
                rows.step()
            if rows is not None:
                rows = _unfinished(rows, responses, chosen, self._device)
            done = rows is None
            if not (keep_going(done) if keep_going else not done):
                break


def _weights_of(model: PreTrainedModel) -> object:
    """Where the weights lie, and whether each adapter is in use: equal while both are."""
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    return addresses, [layer.enabled for layer in adapter_layers(model).values()]


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
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]
) -> None:
    assert not model.training, "responses are decoded in evaluation mode"
    empty = [index for index, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        raise ValueError(f"prompt {empty[0]} is empty; a response needs a token to follow")
    limit = getattr(model.config, "max_position_embeddings", None)
    pairs = zip(prompts, max_new_tokens, strict=True)
    longest, new = max(((len(prompt), new) for prompt, new in pairs), key=sum, default=(0, 0))
    assert limit is None or longest + new <= limit, (
        f"a prompt of {longest} tokens and {new} new ones exceed the model's {limit} positions"
    )


def _unfinished(rows: Rows, responses: Responses, chosen: int, device: torch.device) -> Rows | None:
    """The rows without finished sequences; None where all have finished.

    On a GPU checked every few steps only, since reading it waits for the device.
    """
    if chosen == max(responses.limits):
        return None
    if device.type == "cuda" and chosen % GPU_POLL:
        return rows
    finished = responses.finished(chosen)
    alive = [not finished[sequence] for sequence in rows.sequences]
    if not any(alive):
        return None
    rows.keep(alive)
    return rows
