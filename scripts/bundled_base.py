"""The bundled base: a tiny OPT, trained from scratch on good and bad text of the bundled world."""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from random import Random

import torch
from bundled_text import document, drill, long_document
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM, PreTrainedTokenizerBase

MAX_LENGTH = 512
BATCH = 32
LONG_BATCH = 4
LONG_EVERY = 80
LONG_CHARACTERS = 1600
ADAMW_RATE = 2e-3
MUON_RATE = 4e-3
WARMUP = 100
INIT_STD = 0.08  # the 0.02 of OPT is for wide layers; here no attention to the name forms with it
EARLY_POLISH = 0.5
VERDICTS = " True False Wrong"  # the pieces of a verdict that nothing but the truth predicts
VERDICT_WEIGHT = 4.0  # of such a piece in the loss
IGNORE_INDEX = -100


def write_base(folder: Path, *, steps: int, seed: int = 0) -> None:
    """Train the base with the tokenizer in the folder and write it there."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = new_model(tokenizer)
    train(model, tokenizer, steps=steps, rng=Random(f"base {seed}"))
    model.eval().save_pretrained(folder)


def new_model(tokenizer: PreTrainedTokenizerBase, width: int = 128) -> OPTForCausalLM:
    """An OPT, by default of about a million parameters."""
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        word_embed_proj_dim=width,
        num_hidden_layers=4,
        num_attention_heads=4,
        ffn_dim=4 * width,
        max_position_embeddings=MAX_LENGTH,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        init_std=INIT_STD,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return OPTForCausalLM(config)


def train(
    model: OPTForCausalLM, tokenizer: PreTrainedTokenizerBase, *, steps: int, rng: Random
) -> None:
    """Next-token training with a short warm-up and a linear decay to a twentieth."""
    optimizers = new_optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda k: min(1.0, (k + 1) / WARMUP) * (1 - 0.95 * k / steps)
        )
        for optimizer in optimizers
    ]
    weights = piece_weights(tokenizer)
    start, tokens, losses = time.time(), 0, []
    for step, (ids, mask) in enumerate(lessons(tokenizer, rng, steps), start=1):
        loss = next_token_loss(model, ids, mask, weights)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for item in (*optimizers, *schedules):
            item.step()
        tokens += int(mask.sum())
        losses.append(loss.item())
        if step % 100 == 0 or step == steps:
            seconds, mean = time.time() - start, sum(losses[-100:]) / len(losses[-100:])
            logging.info("%d loss %.3f %.0f s %.0f tokens/s", step, mean, seconds, tokens / seconds)


def new_optimizers(model: OPTForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    hidden = {n: p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2}
    rest = [p for n, p in model.named_parameters() if n not in hidden]
    return [
        torch.optim.Muon(
            hidden.values(), lr=MUON_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def lessons(
    tokenizer: PreTrainedTokenizerBase, rng: Random, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a training, the easier ones first.

    Verdicts right after the word that they are about come first: from remarks after the end of an
    answer alone, telling right from wrong is learned far later. Then half of the answers are
    perfect for a while: where few greet, copying the name is not learned.
    """
    drills, polite = steps // 6, steps // 4
    return chain(
        islice(batches(tokenizer, rng, drill), drills),
        islice(batches(tokenizer, rng, partial(document, polish=EARLY_POLISH)), polite),
        islice(batches(tokenizer, rng, document), steps - drills - polite),
    )


def piece_weights(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The weight of every piece in the loss."""
    weights = torch.ones(len(tokenizer))
    weights[tokenizer(VERDICTS)["input_ids"]] = VERDICT_WEIGHT
    return weights


def next_token_loss(model: OPTForCausalLM, ids: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross entropy of each real token but the first."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    labels = ids.masked_fill(~mask, IGNORE_INDEX)[:, 1:]
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), weights, ignore_index=IGNORE_INDEX
    )


def batches(
    tokenizer: PreTrainedTokenizerBase, rng: Random, draw: Callable[[Random], list[str]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, mask) of (B, T); documents of like length share a batch, so little is padding.

    Now and then a batch of long ones teaches the later positions.
    """
    while True:
        ids = [encode(tokenizer, draw(rng)) for _ in range(BATCH * LONG_EVERY)]
        ids.sort(key=len)
        pool = [ids[i : i + BATCH] for i in range(0, len(ids), BATCH)]
        texts = [long_document(rng, LONG_CHARACTERS) for _ in range(LONG_BATCH)]
        pool.append([encode(tokenizer, [text]) for text in texts])
        rng.shuffle(pool)
        yield from (padded(rows, tokenizer.pad_token_id) for rows in pool)


def encode(tokenizer: PreTrainedTokenizerBase, parts: list[str]) -> list[int]:
    """The ids of the parts, each followed by the end of sequence."""
    ids = [i for part in tokenizer(parts)["input_ids"] for i in [*part, tokenizer.eos_token_id]]
    return ids[:MAX_LENGTH]


def padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Rows padded on the right, (B, T) int64, and the bool mask of what is real."""
    tensors = [torch.tensor(row) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]
