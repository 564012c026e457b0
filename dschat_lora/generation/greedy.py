"""Greedy answers by transformers' own generation."""

from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel

from dschat_lora.generation.batch_state import padded_left
from dschat_lora.lora.parallel import whole_sequences
from dschat_lora.models.causal_lm import fp32_logits
from dschat_lora.models.loading import Tokenizer


@torch.no_grad()
def greedy_decode(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    eos_ids: Collection[int],
    max_new_tokens: int,
    device: torch.device,
    synced: bool = False,
) -> list[list[int]]:
    """Greedy continuations of tokenised prompts, up to and including one of ``eos_ids``.

    The model is in evaluation mode. Long prompts are cut on the left to what its positions allow.
    If ``synced``, every rank goes on until all are done, as sharded weights need it.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None:
        # Of a prompt that leaves no room for an answer the end is kept.
        room = max(1, limit - max_new_tokens)
        prompts = [prompt[-room:] for prompt in prompts]
        max_new_tokens = min(max_new_tokens, limit - 1)
    ids, mask = padded_left(prompts, tokenizer.pad_token_id, device)
    with whole_sequences(model), fp32_logits(model):
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=list(eos_ids),
            use_cache=True,
            synced_gpus=synced,
        )
    answers = output[:, ids.shape[1] :].tolist()
    ends = [next((i for i, t in enumerate(each, 1) if t in eos_ids), None) for each in answers]
    return [each[:end] for each, end in zip(answers, ends, strict=True)]
