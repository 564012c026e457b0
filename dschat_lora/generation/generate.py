"""Batched decoding of a causal language model, one token a step."""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_lora.algos.segments import to_device
from dschat_lora.generation.batch_state import CachedRows, RecomputedRows
from dschat_lora.generation.cuda_graphs import DecodeStep, graphs_for
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.kv_cache import TRIED, fast_attention, in_shards, takes_cache
from dschat_lora.generation.refill import draw_in_slots
from dschat_lora.generation.sampling import Responses, Sampling, undrawn_reason
from dschat_lora.generation.slots import SlotRows
from dschat_lora.kernels import support
from dschat_lora.lora.model import adapter_layers
from dschat_lora.lora.parallel import group_of, whole_sequences
from dschat_lora.models.causal_lm import fp32_logits

# Steps between two checks of which sequences have ended.
GPU_POLL, CPU_POLL = 16, 1
# Of the rows, that are free when waiting prompts are read: a GPU reads many together in less time.
GPU_REFILL, CPU_REFILL = 0.25, 0.0
KeepGoing = Callable[[bool], bool]
# Relative error of logits that rounding explains; a wrong state makes it several tenths.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
_PROMPTS, _STEPS, _COPIES = (4, 2), 3, 2  # tokens of each prompt and of each response to it


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
    texts = responses.tokens()
    copies = max(1, len(texts) // max(1, len(prompts)))
    return [texts[i : i + copies] for i in range(0, len(texts), copies)]


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
            and the memory of the copies; see :class:`FastLinears` for ``rounding`` in 16 bits.
        unpacked: whether 4-bit weights are unpacked once, see :class:`FastLinears`.
        retains: keep what a call has computed, for the ``prefixes`` of the next one.
        refill_share: share of the rows that have to be free before waiting prompts are read into
            them; by default a quarter on a GPU, and 0, at once, on a CPU.
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
        rounding: Callable[[], object] = lambda: 0,
        unpacked: bool | None = None,
        retains: bool = False,
        refill_share: float | None = None,
        record: Callable[[DecodeStep], DecodeStep] | None = None,
    ) -> None:
        self._model, self._eos_ids, self._pad_id = model, frozenset(eos_ids), pad_id
        self._device, self._largest = device, largest
        self._merged, self._rounding = merged, rounding
        self._unpacked, self._group = unpacked, group_of(model)
        self._record, self._retains = record, retains
        on_gpu = device.type == "cuda"
        self._poll, by_default = (GPU_POLL, GPU_REFILL) if on_gpu else (CPU_POLL, CPU_REFILL)
        self._refill_share = by_default if refill_share is None else refill_share
        self._keeps = on_gpu or record is not None
        self._weights: object = None
        self.release()

    @cached_property
    def refills(self) -> bool:
        """Whether a call may have more responses than ``largest`` says, unless ranks keep step.

        That takes our cache.
        """
        return takes_cache(self._model)

    def release(self) -> None:
        """Free what is kept."""
        self._rows: CachedRows | None = None
        self._slots: SlotRows | None = None
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
        bounds = [min(sampling.max_new_tokens, n) for n in limits or ()]
        every_bound = bounds or [sampling.max_new_tokens] * len(prompts)
        copies = _check_prompts(self._model, prompts, seeds, every_bound)
        flat = [seed for each in seeds for seed in each]
        columns = max(map(len, prompts), default=0) + max(bounds, default=sampling.max_new_tokens)
        most_rows = self._largest[0] or len(flat)
        refilled = keep_going is None and (
            self._slots is not None or (self.refills and len(flat) > most_rows)
        )
        if refilled:
            self._rows = None  # one cache at a time
        before = self._rows if self._retains else None
        responses = self._table_for(
            len(flat), columns, sampling, keep_logprobs=keep_logprobs, ragged=limits is not None
        )
        responses.start(flat, [n for n in bounds for _ in range(copies)] or None)
        if not prompts and keep_going is None:
            return responses
        if refilled:
            asked = [prompt for prompt in prompts for _ in range(copies)]
            self._draw_in_slots(asked, responses)
            return responses
        rows = self._rows_for(len(flat), columns) if prompts else None
        with self._kernels():
            if rows is not None:
                rows.start(prompts, responses, copies=copies, source=before, prefixes=prefixes)
            self._run(rows, responses, keep_going)
        return responses

    def _table_for(
        self, rows: int, columns: int, sampling: Sampling, *, keep_logprobs: bool, ragged: bool
    ) -> Responses:
        """Responses of such a call; what is kept is released where it has become useless."""
        known = self._weights
        if self._keeps:
            self._weights = _weights_of(self._model)
        key = (sampling, keep_logprobs, ragged)
        fits = self._rows is None or self._rows.holds(rows, columns)
        fits = fits and (key not in self._responses or self._responses[key].capacity >= rows)
        if not (self._keeps and fits and known == self._weights):
            self.release()
        if key not in self._responses:
            self._responses[key] = Responses(
                max(rows, self._largest[0] if self._keeps else 0),
                sampling,
                eos_ids=self._eos_ids,
                device=self._device,
                keep_logprobs=keep_logprobs,
                ragged=ragged,
            )
        return self._responses[key]

    def _draw_in_slots(self, prompts: Sequence[Sequence[int]], responses: Responses) -> None:
        if self._slots is None:
            self._slots = SlotRows(
                self._model,
                pad_id=self._pad_id,
                retains=False,
                most_rows=self._largest[0],
                record=self._record,
            )
        rows, most_rows = self._slots, self._largest[0] or len(prompts)
        rows.forget()  # those of a call that failed
        if self._keeps:
            rows.reserve(*self._largest)
        with self._kernels():
            draw_in_slots(
                rows,
                prompts,
                responses,
                most_rows=most_rows,
                poll=self._poll,
                refill=max(1, int(self._refill_share * most_rows)),
            )
        if not self._keeps:
            self._slots = None

    def _rows_for(self, rows: int, columns: int) -> CachedRows | RecomputedRows:
        if not self.refills:
            return RecomputedRows(
                self._model, pad_id=self._pad_id, device=self._device, group=self._group
            )
        if self._rows is None:
            capacity = rows, columns
            if self._keeps:
                capacity = max(rows, self._largest[0]), max(columns, self._largest[1])
            record = self._record
            if record is None and self._device.type == "cuda":
                record = graphs_for(self._model)
            self._rows = CachedRows(
                self._model,
                capacity,
                pad_id=self._pad_id,
                device=self._device,
                buckets=self._keeps,
                retains=self._retains,
                record=record,
                group=self._group,
            )
        return self._rows

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._group is not None:
                stack.enter_context(self._group.whole_sequences())
            if not in_shards(self._model):
                if self._linears is None:
                    self._linears = FastLinears(
                        self._model,
                        merged=self._merged,
                        rounding=self._rounding,
                        unpacked=self._unpacked,
                    )
                    if self._keeps:
                        self._weights = _weights_of(self._model)  # some may have been moved
                stack.enter_context(self._linears.in_use())
            stack.enter_context(fp32_logits(self._model))
            if self.refills:
                stack.enter_context(fast_attention(self._model))
            yield

    def _run(
        self,
        rows: CachedRows | RecomputedRows | None,
        responses: Responses,
        keep_going: KeepGoing | None,
    ) -> None:
        """Choose tokens until every sequence has ended, here and, with ``keep_going``, elsewhere.

        The rows have chosen their first one. On a GPU it is checked every few steps only which
        sequences have ended, since reading it waits for the device.
        """
        for chosen in count(1):
            if rows is None:
                # One token, in step with ranks that are not done.
                ids = torch.tensor([[self._pad_id]], device=self._device)
                self._model(input_ids=ids, use_cache=False)
            elif chosen > 1:
                rows.step()
            if rows is not None and chosen == max(responses.limits):
                rows = None
            elif rows is not None and chosen % self._poll == 0:
                finished = responses.finished(chosen)
                alive = [not finished[sequence] for sequence in rows.sequences]
                if any(alive):
                    rows.keep(alive)
                else:
                    rows = None
            if not (keep_going(rows is None) if keep_going else rows is not None):
                break


def _weights_of(model: PreTrainedModel) -> object:
    """Where the weights lie, and whether each adapter is in use: equal while both are."""
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    return addresses, [layer.enabled for layer in adapter_layers(model).values()]


def _check_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
) -> int:
    """Number of responses to each prompt."""
    counts = {len(each) for each in seeds}
    if len(seeds) != len(prompts) or len(counts) > 1 or 0 in counts:
        raise ValueError(
            f"seeds must be one list for each of {len(prompts)} prompts, all of one length of at "
            f"least 1; found {len(seeds)} lists of lengths {sorted(counts)}"
        )
    assert not model.training, "responses are decoded in evaluation mode"
    empty = [index for index, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        raise ValueError(f"prompt {empty[0]} is empty; at least one token is needed")
    limit = getattr(model.config, "max_position_embeddings", None)
    pairs = zip(prompts, max_new_tokens, strict=True)
    longest, new = max(((len(prompt), new) for prompt, new in pairs), key=sum, default=(0, 0))
    assert limit is None or longest + new <= limit, (
        f"a prompt of {longest} tokens and {new} new ones exceed the model's {limit} positions"
    )
    return max(counts, default=1)


def check_cache(model: PreTrainedModel) -> None:
    """Try our cache on a few random tokens, and leave it alone if logits differ from those without.

    Call on every rank before the model decodes, in evaluation mode; a model is tried once.
    """
    if model in TRIED or not takes_cache(model):
        return
    with whole_sequences(model):
        error, reason = _cache_error(model)
        if error > _ROUNDING[model.dtype] and support.runs_kernels(model.device):
            error = _error_without_kernels(model, reason)
    TRIED[model] = error <= _ROUNDING[model.dtype]
    if not TRIED[model]:
        warnings.warn(
            f"decoding without a cache, more slowly: with it, {type(model).__name__} computes "
            f"different logits than without (relative error {error:.1g})",
            stacklevel=2,
        )


def _error_without_kernels(model: PreTrainedModel, reason: str) -> float:
    """The relative error where operators in Triton are not used, which stays so if it is small."""
    support.OFF = True
    error, _ = _cache_error(model)
    if error > _ROUNDING[model.dtype]:
        support.OFF = False
    else:
        warnings.warn(f"computing without kernels in Triton, more slowly: {reason}", stacklevel=3)
    return error


@torch.no_grad()
def _cache_error(model: PreTrainedModel) -> tuple[float, str]:
    """Relative error of logits of given responses, two to each of two prompts, and what it was."""
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    prompts = [draw(length) for length in _PROMPTS]
    answers = [draw(_STEPS) for _ in prompts for _ in range(_COPIES)]
    forced = _Forced(to_device(torch.tensor(answers), model.device))
    columns = max(_PROMPTS) + _STEPS
    capacity, group = (len(answers), columns), group_of(model)
    rows = CachedRows(model, capacity, pad_id=0, device=model.device, group=group)
    # An architecture that takes no cache of ours, or a kernel that does not run.
    failures: tuple[type[Exception], ...] = support.errors(model.device)
    failures += (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
    try:
        with fast_attention(model):
            rows.start(prompts, forced, copies=_COPIES)  # type: ignore[arg-type]
            for _ in range(1, _STEPS):
                rows.step()
    except torch.OutOfMemoryError:
        raise
    except failures as e:
        return float("inf"), f"{type(e).__name__}: {e}"
    cached, expected = torch.stack(forced.logits, 1), []
    for number, answer in enumerate(answers):
        prompt = prompts[number // _COPIES]
        ids = torch.tensor([prompt + answer[:-1]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits
        expected.append(logits[0, len(prompt) - 1 :].float())
    whole = torch.stack(expected)
    if not torch.isfinite(whole).all():
        return 0.0, ""  # which is no fault of the cache, and told by who draws
    error = (cached - whole).norm() / whole.norm().clamp(min=1e-12)
    relative = float(error.nan_to_num(torch.inf))
    name = type(model).__name__
    return relative, f"with them, {name} computes different logits (relative error {relative:.1g})"


class _Forced:
    """In place of responses that are drawn: given tokens, and the logits before each."""

    ragged = False

    def __init__(self, tokens: Tensor) -> None:
        self.capacity, self.limits = len(tokens), [tokens.shape[1]] * len(tokens)
        self.logits: list[Tensor] = []
        self._tokens = tokens

    def advance(self, logits: Tensor, sequences: Tensor, number: Tensor, *_: object) -> Tensor:
        self.logits.append(logits.float())
        return self._tokens[sequences, number]
