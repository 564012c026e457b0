"""The bundled base: a tiny OPT, trained from scratch on good and bad text of the bundled world."""

import logging
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from random import Random

import torch
from bundled_text import document, long_document
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM, PreTrainedTokenizerBase

MAX_LENGTH = 512
BATCH = 32
LONG_BATCH = 4
LONG_EVERY = 80
LONG_CHARACTERS = 1600
LEARNING_RATE = 2e-3
WARMUP = 100
INIT_STD = 0.08  # the 0.02 of OPT is for wide layers; here no attention to the name forms with it
EARLY_POLISH = 0.7
IGNORE_INDEX = -100


def write_base(folder: Path, *, steps: int, seed: int = 0) -> None:
    """Train the base with the tokenizer in the folder and write it there."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = new_model(tokenizer)
    train(model, tokenizer, steps=steps, rng=Random(f"base {seed}"))
    model.eval().save_pretrained(folder)


def new_model(tokenizer: PreTrainedTokenizerBase) -> OPTForCausalLM:
    """An OPT of about a million parameters."""
    width = 128
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
    """Next-token training with a short warm-up and a linear decay to a twentieth.

    The first third is on mostly perfect answers: where few greet, copying the name is not learned.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / WARMUP) * (1 - 0.95 * k / steps)
    )
    start, tokens, losses = time.time(), 0, []
    polite = islice(batches(tokenizer, rng, polish=EARLY_POLISH), steps // 3)
    lessons = chain(polite, islice(batches(tokenizer, rng, polish=0.0), steps - steps // 3))
    for step, (ids, mask) in enumerate(lessons, start=1):
        loss = next_token_loss(model, ids, mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tokens += int(mask.sum())
        losses.append(loss.item())
        if step % 100 == 0 or step == steps:
            seconds, mean = time.time() - start, sum(losses[-100:]) / len(losses[-100:])
            logging.info("%d loss %.3f %.0f s %.0f tokens/s", step, mean, seconds, tokens / seconds)


def next_token_loss(model: OPTForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean cross entropy of each real token but the first."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    labels = ids.masked_fill(~mask, IGNORE_INDEX)[:, 1:]
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
    )


def batches(
    tokenizer: PreTrainedTokenizerBase, rng: Random, *, polish: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, mask) of (B, T); documents of like length share a batch, so little is padding.

    Now and then a batch of long ones teaches the later positions.
    """
    while True:
        ids = [encode(tokenizer, document(rng, polish=polish)) for _ in range(BATCH * LONG_EVERY)]
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
