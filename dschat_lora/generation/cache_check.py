"""Whether a model decodes with our cache as it does without, tried on the model itself."""

import warnings

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_lora.algos.devices import to_device
from dschat_lora.generation.batch_state import CachedRows
from dschat_lora.generation.fast_attention import fast_attention
from dschat_lora.generation.forward import TRIED, takes_cache
from dschat_lora.lora.parallel import whole_sequences

# Relative error of logits that rounding explains; a wrong state makes it several tenths.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
_PROMPTS, _STEPS, _COPIES = (4, 2), 3, 2  # tokens of each prompt and of each response to it


def check_cache(model: PreTrainedModel) -> None:
    """Try our cache on a few random tokens, and leave it alone if logits differ from those without.

    Call on every rank before the model decodes, in evaluation mode; a model is tried once.
    """
    if model in TRIED or not takes_cache(model):
        return
    with whole_sequences(model):
        error = _cache_error(model)
    TRIED[model] = error <= _ROUNDING[model.dtype]
    if not TRIED[model]:
        warnings.warn(
            f"decoding without a cache, more slowly: with it, {type(model).__name__} computes "
            f"other logits than without (relative error {error:.1g})",
            stacklevel=2,
        )


@torch.no_grad()
def _cache_error(model: PreTrainedModel) -> float:
    """Relative error of logits of given responses, two to each of two prompts."""
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    prompts = [draw(length) for length in _PROMPTS]
    answers = [draw(_STEPS) for _ in prompts for _ in range(_COPIES)]
    forced = _Forced(to_device(torch.tensor(answers), model.device))
    columns = max(_PROMPTS) + _STEPS
    rows = CachedRows(model, (len(answers), columns), pad_id=0, device=model.device)
    try:
        with fast_attention(model):
            rows.start(prompts, forced, copies=_COPIES)  # type: ignore[arg-type]
            for _ in range(1, _STEPS):
                rows.step()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return float("inf")  # an architecture that takes no cache of ours
    found, expected = torch.stack(forced.logits, 1), []
    for number, answer in enumerate(answers):
        prompt = prompts[number // _COPIES]
        ids = torch.tensor([prompt + answer[:-1]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits
        expected.append(logits[0, len(prompt) - 1 :].float())
    whole = torch.stack(expected)
    if not torch.isfinite(whole).all():
        return 0.0  # which is no fault of the cache, and told by who draws
    error = (found - whole).norm() / whole.norm().clamp(min=1e-12)
    return float(error) if torch.isfinite(error) else float("inf")


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
