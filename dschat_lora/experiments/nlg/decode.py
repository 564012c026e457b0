"""Decoding of meanings into texts by beam search."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dschat_lora.checkpoint.staging import write_whole
from dschat_lora.config.options import fail
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.tokenize import ended
from dschat_lora.engine.collectives import (
    gather_over_ranks,
    on_rank_zero,
    raise_together,
)
from dschat_lora.engine.distributed import device, init_distributed, rank, shutdown, world_size
from dschat_lora.experiments.nlg.config import DecodeConfig
from dschat_lora.experiments.nlg.loading import load_model
from dschat_lora.experiments.nlg.meanings import (
    Meaning,
    clean_text,
    prediction_lines,
    read_meanings,
)
from dschat_lora.experiments.nlg.validation import epoch_files
from dschat_lora.generation.search import BeamSearch, beam_search
from dschat_lora.models.loading import Tokenizer, load_tokenizer
from dschat_lora.models.source import find_model
from dschat_lora.report.terminal import error_message, log_once


def run_decode(config: DecodeConfig) -> None:
    """Write a line of JSON for every meaning, from a checked config; on every rank.

    A mistake that shows only now, an error of the disk and a full GPU end the process as one
    line.
    """
    if config.dry_run:
        log_once("decode: options, files and data are in order")
        return
    try:
        if words := init_distributed():
            log_once(f"  note         {words}")
        torch.manual_seed(config.seed)
        _decode(config)
    except (ValueError, OSError) as error:
        code = 1 if isinstance(error, OSError) else 2
        fail(error_message(error), code=code)
    except torch.OutOfMemoryError:
        fail(
            "the GPU is full: lower --per_device_eval_batch_size or --num_beams",
            code=1,
        )
    shutdown()


def _decode(config: DecodeConfig) -> None:
    source = find_model(config.model_name_or_path)
    tokenizer = load_tokenizer(source.tokenizer, config.model)
    meanings = read_meanings(config.data_path, tokenizer)
    files: list[Path | None] = [None] if config.epochs == "last" else [*epoch_files(config)]
    load = partial(load_model, config, source, tokenizer)
    output = Path(config.output_path).expanduser()
    if config.epochs == "best":
        held_out = read_meanings(config.eval_data_path, tokenizer)
        scores = {
            str(file): _development_bleu(config, tokenizer, load, file, held_out) for file in files
        }
        files = [Path(max(scores, key=lambda name: scores[name]))]  # the first of equals
        report = {"best": str(files[0]), "bleu": scores}
        path = output.with_suffix(".epochs.json")
        on_rank_zero(lambda: write_whole(path, json.dumps(report, indent=2) + "\n"))
        log_once(f"best epoch: {files[0]}")
    for file in files:
        model = raise_together(partial(load, epoch=file))
        ids = _search_all(config, tokenizer, model, meanings)
        lines = prediction_lines(meanings, _as_texts(ids, tokenizer), ids)
        path = output if config.epochs != "all" or file is None else _beside(output, file)
        on_rank_zero(partial(write_whole, path, "".join(lines)))
        log_once(f"{len(meanings):,} meanings written to {path}")


def _beside(output: Path, file: Path) -> Path:
    """``test.epoch-3.jsonl`` of ``test.jsonl``."""
    return output.with_name(f"{output.stem}.{file.stem}{output.suffix}")


def _development_bleu(
    config: DecodeConfig,
    tokenizer: Tokenizer,
    load: Any,
    file: Path | None,
    meanings: Sequence[Meaning],
) -> float:
    """BLEU of a file of factors on held-out meanings; the same on every rank."""
    from dschat_lora.experiments.nlg.metrics import bleu  # of an extra

    model = raise_together(partial(load, epoch=file))
    texts = _as_texts(_search_all(config, tokenizer, model, meanings), tokenizer)
    if unwritten := [each.text for each in meanings if not each.references]:
        raise ValueError(f"--eval_data_path: {unwritten[0]!r} has no reference to compare with")
    score = bleu(texts, [each.references for each in meanings]).value
    log_once(f"{file}: development BLEU {score:.2f}")
    return score


def _search_all(
    config: DecodeConfig, tokenizer: Tokenizer, model: Any, meanings: Sequence[Meaning]
) -> list[list[int]]:
    """Tokens of the text of each meaning; call on every rank."""
    search = _search(config, tokenizer, model)
    prompts = _prompts(meanings, tokenizer, search, model, seq_len=config.seq_len)
    # Batches are the same for any number of processes, and with them the rounding of the logits.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    size = config.per_device_eval_batch_size
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    lines = torch.full((0, search.max_new_tokens + 2), -1, device=device())
    for own in batches[rank() :: world_size()]:
        texts = beam_search(model, [prompts[i] for i in own], search, device=device())
        width = search.max_new_tokens
        padded = [
            [i, len(t), *t, *[-1] * (width - len(t))] for i, t in zip(own, texts, strict=True)
        ]
        lines = torch.cat([lines, torch.tensor(padded, device=device())])
    found = {i: ids[:length] for i, length, *ids in gather_over_ranks(lines).tolist()}
    return [found[i] for i in range(len(meanings))]


def _as_texts(ids: Sequence[list[int]], tokenizer: Tokenizer) -> list[str]:
    plain = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return [clean_text(plain(each)) for each in ids]


def _search(config: DecodeConfig, tokenizer: Tokenizer, model: Any) -> BeamSearch:
    tokens = model.get_input_embeddings().num_embeddings
    for value in config.eos_token_id:
        if value >= tokens:
            raise ValueError(f"--eos_token_id {value}: the model has {tokens} tokens, from 0")
    return BeamSearch(
        num_beams=config.num_beams,
        max_new_tokens=config.max_new_tokens,
        # In this order and once each: transformers searches wider for every one.
        eos_ids=tuple(dict.fromkeys((int(tokenizer.eos_token_id), *config.eos_token_id))),
        pad_id=int(tokenizer.pad_token_id),
        length_penalty=config.length_penalty,
        no_repeat_ngram_size=config.no_repeat_ngram_size,
        repetition_penalty=config.repetition_penalty,
        min_length=config.min_length,
    )


def _prompts(
    meanings: Sequence[Meaning],
    tokenizer: Tokenizer,
    search: BeamSearch,
    model: Any,
    *,
    seq_len: int | None = None,
) -> list[list[int]]:
    """Tokens of each meaning and the end-of-sequence token behind it, as in training."""
    encoded = make_encoder(tokenizer).encode([each.text for each in meanings])
    prompts = [ended(ids, int(tokenizer.eos_token_id)) for ids in encoded]
    most = getattr(model.config, "max_position_embeddings", None)
    limit = min((each for each in (most, seq_len) if each is not None), default=None)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length = len(prompts[longest])
    if limit is not None and length + search.max_new_tokens > limit:
        raise ValueError(
            f"--max_new_tokens {search.max_new_tokens} and the {length} tokens of the meaning "
            f"{meanings[longest].text[:60]!r} exceed "
            + (f"--seq_len {limit}" if limit == seq_len else f"the model's {limit} positions")
        )
    return prompts
